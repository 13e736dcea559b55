# SPDX-License-Identifier: Apache-2.0
"""vLLM's own weight transfer as updates of this engine: a trainer starts one, sends tensors to it, and finishes it.

    init ──▶ start ──▶ update … update ──▶ finish
              ▲           │ fails           │
              └───────────┴─────────────────┘

An update that fails ends at once, and what is served stays. Until the next one starts, calls are told why it failed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.log_text import shown
from vllm_fp8ext.update.contract import native_info
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.native_info import NcclInit
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import failures
from vllm_fp8ext.update.contract.results import Done, Finishing, Result
from vllm_fp8ext.update.contract.update_errors import refusal
from vllm_fp8ext.update.engine.chunk_staging import ChunkStaging
from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.jobs import Flow, Jobs, OnRanks
from vllm_fp8ext.update.engine.served_model import ServedModel
from vllm_fp8ext.update.engine.session import Session
from vllm_fp8ext.update.engine.timestamp import Moment
from vllm_fp8ext.update.engine.updates import OpenRequest, Updates
from vllm_fp8ext.update.transports.native.message import (
    NativeSource,
    batches,
    native_source,
    placed,
    spec_bytes,
)

logger = logging.getLogger("vllm.fp8ext")

NCCL, IPC = "fp8ext_nccl", "fp8ext_ipc"
"""Names of this plugin's weight transfer engines, which stand for vLLM's `nccl` and `ipc`."""
_NAMES_LOGGED = 8
_JOINING = "native-init"
"""Id under which ranks join a group, beside those of updates."""


class NativeUpdates:
    """State of the transfer: the group that ranks have joined, and the update that is under way.

    `abandon`: gives an update up by its id.
    """

    def __init__(
        self,
        core: Core,
        jobs: Jobs,
        committer: Committer,
        updates: Updates,
        model: ServedModel,
        chunks: ChunkStaging,
        *,
        clock: Callable[[], Moment],
        abandon: Callable[[str], object],
    ) -> None:
        self._core = core
        self._jobs = jobs
        self._committer = committer
        self._updates = updates
        self._model = model
        self._staging = chunks
        self._clock = clock
        self._abandon = abandon
        self._settings = core.settings
        self._init: NcclInit | None = None
        self._groups = 0
        """Number of groups that ranks were told to join."""
        self._id: str | None = None
        self._chunks = 0
        self._failure: str | None = None
        """Reason why the last update ended without a commit."""
        self._paused_before = False
        """True when the engine was paused as the update started."""

    def init(self, info: Any) -> Result:
        """Join a trainer's group; a job. A trainer that comes anew ends the update that it, or another, left open.

        Raises:
            UpdateError: `no-transfer-engine`, `not-served`, `update-open` (of `/fp8ext/v1`), `invalid-request`,
                `transfer-timeout`, `transfer-failed`.
        """
        self._require_backend()
        world_size = self._model.manifest().world_size
        if self._core.weight_transfer == IPC:
            native_info.ipc_init(info)
            message = "the backend ipc is not served yet: expected nccl, or this package's client with transport ipc"
            raise UpdateError("not-served", message)
        nccl = native_info.nccl_init(info, world_size)
        limit = self._settings.receive_bytes
        if nccl.packed and nccl.packed_buffer_size_bytes > limit:
            raise native_info.invalid(
                f"init_info: expected packed_buffer_size_bytes up to {limit} (the setting receive_bytes), found "
                f"{nccl.packed_buffer_size_bytes}"
            )
        self._end("a trainer has initialized the transfer anew")
        self._require_no_other()
        self._init, self._groups = None, self._groups + 1
        return self._jobs.start(self._join(nccl))

    def _join(self, init: NcclInit) -> Flow[Result]:
        yield from _on_ranks(_JOINING, self._source(init))
        self._init = init
        return Done()

    def shutdown(self) -> Result:
        """Leave the trainer's group; a job.

        Raises:
            UpdateError: `update-open`, while an update is under way.
        """
        self._require_backend()
        if self._session() is not None:
            message = "can't release the trainer's connection during a weight update: finish it before"
            raise UpdateError("update-open", message)
        init, self._init = self._init, None
        return Done() if init is None else self._jobs.start(self._leave(init))

    def _leave(self, init: NcclInit) -> Flow[Result]:
        yield from _on_ranks(_JOINING, replace(self._source(init), native=0))
        return Done()

    def start(self) -> Result:
        """Open an update.

        Raises:
            UpdateError: `update-open`, `no-transfer-engine`, `poisoned` where `native_complete` is off.
        """
        self._require_backend()
        if self._session() is not None:
            message = (
                "start_weight_update: a weight update is active already: call finish_weight_update first"
            )
            raise UpdateError("update-open", message, open=self._id)
        committer = self._committer
        complete = self._settings.native_complete or committer.poisoned is not None
        request = OpenRequest(
            partial=not complete,
            base_epoch=None if complete else committer.live.epoch,
            through_pause=True,
        )
        session = self._updates.open(self._model.manifest(), request)
        session.lifetime = self._settings.native_update_seconds
        session.touch(self._clock())
        self._id, self._chunks, self._failure = session.id, 0, None
        self._paused_before = self._core.paused()
        return Done()

    def update(self, info: Any) -> Result:
        """Receive and stage tensors; a job. When anything is wrong with them the update ends, what is served stays.

        What was announced is received all the same, where that can be measured: a trainer would wait for ever.

        Raises:
            UpdateError: `no-update`, `not-initialized`, or what is wrong.
        """
        session = self._require_session("update_weights")
        return self._jobs.start(self._update(session, info))

    def _update(self, session: Session, info: Any) -> Flow[Result]:
        try:
            if self._init is None:
                message = "update_weights: expected init_weight_transfer_engine before, found no trainer"
                raise UpdateError("not-initialized", message)
            errors = yield from self._receive(session, self._init, info)
            if errors:
                raise merged(errors)
        except UpdateError as error:
            self._fail(session, error)
            raise
        return Done()

    def _receive(self, session: Session, init: NcclInit, info: Any) -> Flow[list[UpdateError]]:
        """Receive all that was announced, and stage it unless something is wrong; ends with all that is."""
        told = native_info.announced(native_info.own_part(info, session.manifest.world_size))
        init = _overridden(init, told)
        specs = [replace(spec, name=session.manifest.unwrapped(spec.name)) for spec in told.specs]
        sizes = [spec_bytes(spec) for spec in specs]
        refused = _refused(session, specs)
        errors = [] if refused is None else [refused]
        for parts, tensors in batches(specs, sizes, init.bucket_bytes, self._settings.receive_bytes):
            source = self._source(init, parts)
            try:
                call = None if errors else self._prepare(session, source, tensors)
            except UpdateError as error:
                errors.append(error)
                call = None
            try:
                if call is None:
                    yield from _on_ranks(session.id, source)
                else:
                    yield from self._staging.run(session, f"native-{self._chunks}", call)
            except UpdateError as error:
                errors.append(error)
        return errors

    def _prepare(self, session: Session, source: NativeSource, specs: list[TensorSpec]) -> OnRanks:
        batch = placed(source, specs)
        listed = [[t.spec.name, list(t.spec.shape), t.spec.dtype, t.start, t.size] for t in batch.tensors]
        self._chunks += 1
        chunk, size = f"native-{self._chunks}", sum(source.parts)
        call, _ = self._staging.prepare(session, chunk, batch.source.as_dict(), listed, size)
        return call

    def finishing(self, version: Any = None) -> Result:
        """Look at what came, and name it `version`: the update is about to be committed, by its id.

        Raises:
            UpdateError: `no-update`, `staging`, `incomplete`, `invalid-request`.
        """
        session = self._require_session("finish_weight_update")
        if session.busy:
            raise UpdateError("staging", "finish_weight_update: an update_weights is still under way")
        session.require_alterable("finish")
        try:
            if version is not None:
                session.version, session.named = native_info.require_version(version), True
            session.check(self._committer.live.epoch)
        except UpdateError as error:
            self._fail(session, error)
            raise
        manifest, came = session.manifest, session.staged_names()
        kept = sorted(manifest.tensors.keys() - came)
        if kept:
            some = ", ".join(kept[:_NAMES_LOGGED])
            logger.info(
                "fp8ext: %d of %d tensors did not come and keep their served weights: %s%s",
                len(kept),
                len(manifest.tensors),
                some,
                ", …" if len(kept) > _NAMES_LOGGED else "",
            )
        return Finishing(id=session.id, kept=kept)

    def failed(self, reason: Mapping[str, Any]) -> Result:
        """End the update whose commit was refused for this reason, an error as a dict."""
        session = self._session()
        if session is not None:
            self._fail(session, UpdateError.from_dict(dict(reason)))
        return Done()

    def relabel(self, version: Any) -> Result:
        """Give what is served another version. Its epoch stays."""
        committer = self._committer
        committer.live = committer.live._replace(version=native_info.require_version(version))
        self._core.relabel(committer.live)
        return Done()

    def closed(self, session: Session) -> None:
        """Note that an update has ended without a commit; a pause that was taken inside it ends with it."""
        if session.id != self._id:
            return
        self._id = None
        if self._failure is None:
            self._failure = f"it was {session.state}"
        core = self._core
        if not self._paused_before and core.paused() and self._committer.poisoned is None:
            logger.warning("fp8ext: generation goes on: the weight update in which it was paused has ended")
            core.unpause()

    def _end(self, why: str) -> None:
        """End an update of this protocol that somebody left open."""
        session = self._session()
        if session is not None:
            self._fail(session, UpdateError("wrong-state", why))

    def _fail(self, session: Session, error: UpdateError) -> None:
        failure = f"{error.kind}: {error}"
        logger.warning("fp8ext: weight update %s ends, what is served stays: %s", session.id, shown(failure))
        if session.id == self._id:
            self._failure = failure
        if session.alterable:
            self._abandon(session.id)
        if session.id == self._id:
            self._id = None

    def _session(self) -> Session | None:
        """Return the update of this protocol that has not ended."""
        session = self._updates.sessions.get(self._id or "")
        return session if session is not None and session.live else None

    def _require_session(self, call: str) -> Session:
        self._require_backend()
        session = self._session()
        if session is None:
            why = f"; the last one ended: {self._failure}" if self._failure else ""
            message = f"{call}: expected start_weight_update before, found no active weight update{why}"
            raise UpdateError("no-update", message)
        return session

    def _require_backend(self) -> None:
        if self._core.weight_transfer is None:
            raise UpdateError(
                "no-transfer-engine",
                "weight transfer is not configured: start the server with "
                """--weight-transfer-config '{"backend": "nccl"}'""",
            )

    def _require_no_other(self) -> None:
        other = self._updates.under_way
        if other is not None:
            message = f"update {other.id} (version {other.version}) is open: one at a time"
            raise UpdateError("update-open", message, open=other.id)

    def _source(self, init: NcclInit, parts: Sequence[int] = ()) -> NativeSource:
        backend = "gloo" if self._core.device_type == "cpu" else "nccl"
        return native_source(init, self._groups, backend, self._settings.upload_idle_seconds, parts)


def _on_ranks(id: str, source: NativeSource) -> Flow[None]:
    """Have the ranks take part in broadcasts of which nothing is staged.

    Raises:
        UpdateError: of the first rank that could not.
    """
    results = yield OnRanks(RankMethod.STAGE, id, source.as_dict(), [], {}, 0.0, [])
    failed = failures(results)
    if failed:
        raise failed[0].error


def _overridden(init: NcclInit, told: native_info.Announced) -> NcclInit:
    """Return how these tensors come: trainers of vLLM before 0.28 say it with each call."""
    wire = dict(told.wire)
    names = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")
    native_info.require_wire(wire, names)
    if not wire:
        return init
    size = wire.get("packed_buffer_size_bytes", init.packed_buffer_size_bytes)
    if (
        type(wire.get("packed", False)) is not bool
        or type(size) is not int
        or not 0 < size <= native_info.MOST_BUCKET_BYTES
    ):
        raise native_info.invalid(
            f"update_info: expected packed as a boolean and its size in bytes, found {wire!r:.200}"
        )
    return replace(init, packed=wire.get("packed", init.packed), packed_buffer_size_bytes=size)


def _refused(session: Session, specs: Sequence[TensorSpec]) -> UpdateError | None:
    """Return the error of tensors of one call that can be told before they come."""
    manifest = session.manifest
    canonical = [replace(spec, name=manifest.canonical(spec.name)) for spec in specs]
    problems = manifest.problems(canonical, session.expert_layout)
    brought = Counter(manifest.parts(spec.name for spec in canonical))
    earlier = {name for chunk in session.chunks.values() for name in chunk.names}
    problems += [
        {"kind": "duplicate-tensor", "tensor": name}
        for name, count in sorted(brought.items())
        if (count > 1 or name in earlier) and not manifest.ignores(name)
    ]
    return refusal(problems) if problems else None


def merged(errors: Sequence[UpdateError]) -> UpdateError:
    """Return one error for all: everything that is wrong with tensors, or the first."""
    problems = [problem for error in errors for problem in error.details.get("problems", ())]
    if len(errors) > 1 and all("problems" in error.details for error in errors):
        return refusal(problems)
    return errors[0]
