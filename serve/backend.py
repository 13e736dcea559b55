# SPDX-License-Identifier: Apache-2.0
"""The engine behind the routes, the room for uploads, and what is known of both."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from vllm_fp8ext.compat.features import states
from vllm_fp8ext.compat.update.api_processes import ApiProcesses
from vllm_fp8ext.compat.update.engine_client import EngineCalls
from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.allowed_dirs import AllowedDirs
from vllm_fp8ext.serve.body_process import BodyProcess
from vllm_fp8ext.serve.metrics import Metrics
from vllm_fp8ext.serve.spool import Spool
from vllm_fp8ext.serve.work import keep_running, outcome
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.contract.operations import Operation
from vllm_fp8ext.update.contract.results import EngineStatus, ServedManifest, UpdateState
from vllm_fp8ext.update.transports.dense_tensor import ITEM_BYTES
from vllm_fp8ext.update.transports.nccl.message import MARK_BYTES
from vllm_fp8ext.update.transports.transport import ServerLimits

_HEADER_ROOM = 4096
_REFRESH_SECONDS = 5.0
_ENDED = (404, 409, 410)
"""Statuses of an update that takes no chunks any more; others tell of an engine that is busy, or worse."""


class Backend:
    """The engine, the spool and the state that all routes share; filled once the engine is there."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.processes = ApiProcesses()
        self.engine: EngineCalls
        self.spool: Spool
        self.world_size = 1
        self.receive_bytes = 0
        """Bytes to which buckets of broadcasts are filled."""
        self.largest_bytes = 0
        """Bytes of the largest tensor in any dtype and form: a bucket of one tensor may have as many."""
        self.receive_seconds = 0.0
        self.read_pickles = False
        self.allowed_dirs = AllowedDirs()
        self.bodies = BodyProcess()
        self.poisoned: str | None = None
        self.commits: dict[str, asyncio.Future[UpdateState]] = {}
        """Commits that go on, by the id of the update."""
        self.metrics = Metrics(registry)
        self.features: list[dict[str, Any]] = []
        """Features that serving can do without, on or off in this engine (fields of `schema.FeatureStatus`)."""
        self._coming: list[tuple[str, asyncio.Event]] = []
        """Bodies on their way: their update, and the event to set when another is open, or none."""
        self._cleanup = contextlib.ExitStack()
        self._manifest_body: bytes | None = None

    def connect(self, engine_client: Any, *, routes: bool = True) -> None:
        """Be about this engine, with the settings that it was started with. `routes`: whether there are any, and so room for
        what they take.

        Raises:
            ConfigError: another one is about it, or uploads find no place.
        """
        settings = Settings.parse(engine_client.vllm_config.additional_config)
        self.processes = ApiProcesses.of(engine_client.vllm_config)
        self.engine = EngineCalls(engine_client, settings.deadline_seconds, self._note_poison)
        self._cleanup.callback(self.engine.end.close)
        self.features = [asdict(state) for state in states(engine_client.vllm_config)]
        if not routes:
            return
        idle_seconds, count = settings.upload_idle_seconds, self.processes.count
        self.spool = Spool(settings.spool_dir, settings.spool_bytes, idle_seconds, count)
        self._cleanup.callback(self.spool.close)
        self._cleanup.callback(self.bodies.close)
        self.receive_bytes, self.receive_seconds = settings.receive_bytes, settings.upload_idle_seconds
        self.read_pickles = settings.native_pickled_handles
        self.allowed_dirs = AllowedDirs(settings.allowed_dirs)

    @property
    def limits(self) -> ServerLimits:
        """Limits of a chunk that the ranks fetch themselves."""
        return ServerLimits(
            world_size=self.world_size,
            chunk_bytes=max(self.receive_bytes, self.largest_bytes),
            seconds=self.receive_seconds,
        )

    def _note_poison(self, poisoned: str | None) -> None:
        self.poisoned = poisoned

    def close(self) -> None:
        """Leave the engine as it was found, and give back the room."""
        self._cleanup.close()

    async def join(self) -> None:
        """Tell the engine of this API server process, which is one of several.

        Raises:
            UpdateError: the engine has ended.
        """
        chunk_bytes = self.spool.limit if hasattr(self, "spool") else None
        self.engine.end.adopt((await self.engine(Operation.JOIN, chunk_bytes=chunk_bytes)).pids)

    async def keep_following(self) -> None:
        """`refresh_status` whenever another API server process has changed something, as long as the engine lives."""
        known: dict[str, Any] | None = None
        while True:
            change = await outcome(self.engine.changed(known))
            if isinstance(change, UpdateError):
                return
            known = change
            await outcome(self.refresh_status())

    async def require_room(self) -> None:
        """Make room for the largest tensor of a checkpoint, in any form.

        Raises:
            ConfigError: it never could.
            UpdateError: this engine takes no updates.
        """
        served_manifest = (await self._served_manifest()).manifest
        manifest = Manifest.from_dict(served_manifest)
        await self.bodies.know(served_manifest)
        sizes = {
            name: math.prod(spec.shape) * spec.torch_dtype.itemsize for name, spec in manifest.tensors.items()
        }
        largest = max(sizes, key=lambda name: sizes[name])
        self.spool.require_room(sizes[largest] + _HEADER_ROOM, f"{largest} alone")
        self.world_size = manifest.world_size
        self.receive_bytes = max(self.receive_bytes, sizes[largest] + MARK_BYTES)
        shapes = [spec.shape for spec in manifest.tensors.values()]
        shapes += [whole.shape for whole in manifest.fused.values()]
        self.largest_bytes = max(ITEM_BYTES.values()) * max(map(math.prod, shapes)) + MARK_BYTES

    async def manifest_body(self) -> bytes:
        """Return the manifest as JSON. It does not change in an engine's life, so that it is made once.

        Raises:
            UpdateError: this engine takes no updates.
        """
        if self._manifest_body is None:
            await self._served_manifest()
        assert self._manifest_body is not None
        return self._manifest_body

    async def rank_manifest_body(self, rank: int) -> bytes:
        """Return what one rank serves, as JSON.

        Raises:
            UpdateError: `unknown-rank`; this engine takes no updates.
        """
        served: ServedManifest = await self.engine(Operation.MANIFEST)

        def body() -> bytes:
            manifest = Manifest.from_dict(served.manifest)
            if not 0 <= rank < manifest.world_size:
                message = f"no rank {rank}: expected 0 to {manifest.world_size - 1}"
                raise UpdateError(
                    "unknown-rank", message, status=404, expected=manifest.world_size - 1, found=rank
                )
            shown = manifest.as_dict(rank)
            return json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()

        return await asyncio.to_thread(body)

    async def _served_manifest(self) -> ServedManifest:
        """Ask the engine for its manifest, and keep the answer's body."""
        served: ServedManifest = await self.engine(Operation.MANIFEST)
        # as FastAPI writes JSON; thousands of tensors would hold up the event loop
        body = await asyncio.to_thread(
            lambda: json.dumps(served.manifest, ensure_ascii=False, separators=(",", ":")).encode()
        )
        self._manifest_body = body
        return served

    async def keep_refreshing(self) -> None:
        """`refresh_status` every few seconds, as long as the engine lives: updates expire by it, too."""
        while True:
            status = await outcome(self.refresh_status())
            if isinstance(status, UpdateError) and status.kind == "engine-dead":
                return
            await asyncio.sleep(_REFRESH_SECONDS)

    def refresh_status_soon(self) -> None:
        """`refresh_status`, beside whatever goes on."""
        keep_running(outcome(self.refresh_status()))

    @contextlib.asynccontextmanager
    async def status_refreshed(self) -> AsyncIterator[None]:
        """Around what may poison the engine or heal it: before anybody is told, the poison guard knows."""
        known = self.poisoned is not None
        try:
            yield
        except UpdateError as error:
            known = known or error.kind == "poisoned"
            raise
        finally:
            if known:
                await outcome(self.refresh_status())
            else:
                self.refresh_status_soon()

    async def abandon(self, id: str) -> UpdateState:
        """Give an update up; one in place may poison the engine by that, which the poison guard then knows."""
        try:
            state: UpdateState = await self.engine(Operation.ABANDON, id=id)
            return state
        finally:
            await outcome(self.refresh_status())

    async def refresh_status(self) -> EngineStatus:
        """Ask the engine for its status, and tell metrics and the poison guard."""
        status: EngineStatus = await self.engine(Operation.STATUS)
        self._note_poison(status.poisoned)
        self.metrics.observe(status)
        for id, gone in self._coming:
            if status.update != id:
                gone.set()
        return status

    async def refresh_metrics(self) -> None:
        """`refresh_status`, once there is an engine."""
        if hasattr(self, "engine"):
            await self.refresh_status()

    @contextlib.asynccontextmanager
    async def keep_update_open(self, id: str) -> AsyncIterator[None]:
        """An update that does not expire meanwhile: something is on its way to it, which is cancelled when the update ends.

        Raises:
            UpdateError: it takes no chunks, or no more.
        """
        lifetime = (await self.engine(Operation.CHECK, id=id)).seconds
        coming = asyncio.current_task()
        assert coming is not None
        ended: UpdateError | None = None

        gone = asyncio.Event()

        async def keep() -> None:
            nonlocal ended
            while ended is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(lifetime / 4):
                        await gone.wait()
                gone.clear()
                refusal = await outcome(self.engine(Operation.CHECK, id=id))
                if isinstance(refusal, UpdateError) and refusal.status in _ENDED:
                    ended = refusal
                    coming.cancel()

        keeping = asyncio.create_task(keep())
        self._coming.append((id, gone))
        try:
            yield
        except asyncio.CancelledError:
            if ended is None or coming.uncancel():
                raise
            raise ended from None
        finally:
            keeping.cancel()
            self._coming.remove((id, gone))

    async def abandon_open(self) -> None:
        """Give up the open update, if any, and a rollback that waits: nobody is left to finish them."""
        await self.engine.leave()
        updating = (await self.engine(Operation.STATUS)).update
        if updating is not None:
            await self.engine(Operation.ABANDON, id=updating)
