# SPDX-License-Identifier: Apache-2.0
"""vLLM's own weight transfer as updates of this engine: a trainer starts one, sends tensors to it, and finishes it.

    init ──▶ start ──▶ update … update ──▶ finish
              ▲           │ fails           │
              └───────────┴─────────────────┘

An update that fails ends at once, and what is served stays. Until the next one starts, calls are told why it failed.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.log_text import shown
from vllm_fp8ext.update.contract import native_info
from vllm_fp8ext.update.contract.native_info import IpcInit
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.results import Done, Finishing, Result
from vllm_fp8ext.update.engine.chunk_staging import ChunkStaging
from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.jobs import Flow, Jobs
from vllm_fp8ext.update.engine.native_tensors import NativeTensors, TrainerGroup, merged, on_ranks
from vllm_fp8ext.update.engine.served_model import ServedModel
from vllm_fp8ext.update.engine.session import Session
from vllm_fp8ext.update.engine.timestamp import Moment
from vllm_fp8ext.update.engine.updates import OpenRequest, Updates

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
        self._clock = clock
        self._abandon = abandon
        self._settings = core.settings
        self._tensors = NativeTensors(core, chunks, clock)
        self._group: TrainerGroup | None = None
        self._handles: IpcInit | None = None
        """How a trainer on this machine hands tensors over."""
        self._groups = 0
        """Number of groups that ranks were told to join."""
        self._receiving: str | None = None
        """Id of the update to which an `update` is bringing tensors."""
        self._id: str | None = None
        self._failure: str | None = None
        """Reason why the last update ended without a commit."""
        self._paused_before = False
        """True when the engine was paused as the update started."""

    def init(self, info: Any) -> Result:
        """Join a trainer's group; a job. A trainer that comes anew ends the update that it, or another, left open.

        Raises:
            UpdateError: `no-transfer-engine`, `update-open` (of `/fp8ext/v1`), `invalid-request`,
                `transfer-timeout`, `transfer-failed`.
        """
        self._require_backend()
        world_size = self._model.manifest().world_size
        if self._core.weight_transfer == IPC:
            handles = native_info.ipc_init(info)
            self._end("a trainer has initialized the transfer anew")
            self._require_no_other()
            self._handles = handles
            return Done()
        nccl = native_info.nccl_init(info, world_size)
        limit = self._settings.receive_bytes
        if nccl.packed and nccl.packed_buffer_size_bytes > limit:
            raise native_info.invalid(
                f"init_info: expected packed_buffer_size_bytes up to {limit} (the setting receive_bytes), found "
                f"{nccl.packed_buffer_size_bytes}"
            )
        self._end("a trainer has initialized the transfer anew")
        self._require_no_other()
        self._group, self._groups = None, self._groups + 1
        return self._jobs.start(self._join(TrainerGroup(number=self._groups, init=nccl)))

    def _join(self, group: TrainerGroup) -> Flow[Result]:
        yield from on_ranks(_JOINING, self._tensors.source(group))
        if group.number == self._groups:
            self._group = group
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
        group, self._group, self._handles = self._group, None, None
        return Done() if group is None else self._jobs.start(self._leave(group))

    def _leave(self, group: TrainerGroup) -> Flow[Result]:
        yield from on_ranks(_JOINING, replace(self._tensors.source(group), native=0))
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
        self._id, self._failure = session.id, None
        self._paused_before = self._core.paused()
        return Done()

    def update(self, info: Any) -> Result:
        """Receive and stage tensors; a job. When anything is wrong with them the update ends, what is served stays.

        What was announced is received all the same, where that can be measured: a trainer would wait for ever.

        Raises:
            UpdateError: `no-update`, `staging`, `not-initialized`, or what is wrong.
        """
        session = self._require_session("update_weights")
        if self._receiving == session.id:
            raise UpdateError("staging", "update_weights: another update_weights is still under way")
        return self._jobs.start(self._update(session, info))

    def _update(self, session: Session, info: Any) -> Flow[Result]:
        self._receiving = session.id
        try:
            group, handles = self._group, self._handles
            if handles is not None:
                received = yield from self._tensors.read(session, handles, info)
            elif group is not None:
                received = yield from self._tensors.receive(session, group, info)
            else:
                message = "update_weights: expected init_weight_transfer_engine before, found no trainer"
                raise UpdateError("not-initialized", message)
            if received.lost and group is not None and group is self._group:
                self._group = None
                yield from self._leave(group)
            if received.errors:
                raise merged(received.errors)
        except UpdateError as error:
            self._fail(session, error)
            raise
        except Exception as error:
            self._fail(session, UpdateError("internal", f"{type(error).__name__}: {error}", status=500))
            raise
        finally:
            if self._receiving == session.id:
                self._receiving = None
        return Done()

    def finishing(self, version: Any = None) -> Result:
        """Look at what came, and name it `version`: the update is about to be committed, by its id.

        Raises:
            UpdateError: `no-update`, `staging`, `incomplete`, `invalid-request`.
        """
        session = self._require_session("finish_weight_update")
        if session.busy or self._receiving == session.id:
            raise UpdateError("staging", "finish_weight_update: an update_weights is still under way")
        session.require_alterable("finish")
        try:
            if version is not None:
                session.version, session.named = native_info.require_version(version), True
            session.check(self._committer.live.epoch)
        except UpdateError as error:
            self._fail(session, error)
            raise
        self._give_back()
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
            self._give_back()
        if session.id == self._id:
            self._id = None

    def _give_back(self) -> None:
        """Let go of a trainer's packed buffer, which stays open for one update."""
        if self._handles is not None and self._handles.packed:
            self._core.ranks(RankMethod.CLOSE_SOURCES)

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
