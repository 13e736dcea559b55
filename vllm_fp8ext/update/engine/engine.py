# SPDX-License-Identifier: Apache-2.0
"""The update engine: one per engine core, between steps. Sessions in, calls to the ranks out.

Every operation returns at once. Work that takes long (staging, the canary, digests) is a job that the caller polls, and so is
a commit that waits for running requests. An operation never raises: its result may be a `Failure`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from vllm_fp8ext.errors import UpdateError, errors_as_results
from vllm_fp8ext.update.contract.operations import Operation, RankMethod
from vllm_fp8ext.update.contract.results import (
    Done,
    EngineStatus,
    Joined,
    Lifetime,
    Result,
    ServedManifest,
    ServedScales,
    UpdateState,
)
from vllm_fp8ext.update.contract.update_errors import not_generating
from vllm_fp8ext.update.engine.audits import Audits
from vllm_fp8ext.update.engine.chunk_staging import ChunkStaging
from vllm_fp8ext.update.engine.commit_calls import CommitCalls
from vllm_fp8ext.update.engine.commit_check import CommitCheck
from vllm_fp8ext.update.engine.commits import Commits
from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.jobs import Jobs
from vllm_fp8ext.update.engine.kv_scales import KvEngine
from vllm_fp8ext.update.engine.loads import LoadedUpdates
from vllm_fp8ext.update.engine.native import NativeUpdates
from vllm_fp8ext.update.engine.pauses import Pauses
from vllm_fp8ext.update.engine.preparation import Preparation
from vllm_fp8ext.update.engine.served_model import ServedModel
from vllm_fp8ext.update.engine.session import Running, Session, State
from vllm_fp8ext.update.engine.sleeping import Sleeping
from vllm_fp8ext.update.engine.timestamp import Moment
from vllm_fp8ext.update.engine.totals import Totals
from vllm_fp8ext.update.engine.updates import OpenRequest, Updates
from vllm_fp8ext.update.engine.verification import CommittedFingerprints

POLL_SECONDS = 0.01
"""Seconds that a request which comes to an idle engine may wait for a poll."""


class UpdateEngine:
    """State of live updates in one engine."""

    def __init__(self, core: Core, clock: Callable[[], Moment] = Moment.now) -> None:
        self.core = core
        self.totals = Totals()
        self.jobs = Jobs(
            core.ranks, lambda: 0.0 if core.unfinished() else POLL_SECONDS, lambda why: core.end(why)
        )
        self.kv = KvEngine(core)
        self.committer = Committer(core, self.totals, self.kv)
        self.updates = Updates(core, self.committer, self.kv, clock)
        self._fingerprints = CommittedFingerprints()
        self._model = ServedModel(core, self.committer, self.kv, self._fingerprints)
        self._preparation = Preparation(
            self.jobs, self.committer, self.kv, clock, core.settings.deadline_seconds
        )
        self._chunks = ChunkStaging(core, self.jobs, self.committer, clock)
        self._audits = Audits(self.committer, self._fingerprints)
        self._check = CommitCheck(core, self.jobs, self.committer, self._fingerprints)
        self._commits = Commits(
            *(core, self.committer, self._check, self.kv, self.updates, self._fingerprints, self.totals),
            abandon=self.abandon,
        )
        wait, seconds = self._commits.wait, core.settings.deadline_seconds
        self._commit_calls = CommitCalls(self.jobs, self._commit, wait, seconds)
        self._clock = clock
        self._group: str | None = None
        """Id of the group of broadcasts that the ranks were told of last."""
        self._chunk_bytes: int | None = None
        """Largest body that every API server process takes, where several have said so."""
        self.sleeping = Sleeping(core, self.committer, self.jobs, self._abandon_open)
        self.native = NativeUpdates(
            *(core, self.jobs, self.committer, self.updates, self._model, self._chunks),
            clock=clock,
            abandon=self.abandon,
        )
        self.loads = LoadedUpdates(
            *(core, self.committer, self.updates, self._model),
            clock=clock,
            handle=self.handle,
            abandon=self.abandon,
            busy=self._busy,
            kv=self.kv,
        )
        self.pauses = Pauses(core, self.committer, clock)
        self._operations = self._handlers()

    def _handlers(self) -> dict[Operation, Callable[..., Result]]:
        return {
            Operation.JOIN: self.join,
            Operation.STATUS: self.status,
            Operation.MANIFEST: self.manifest,
            Operation.OPEN: self.open,
            Operation.CHECK: self.check,
            Operation.STAGE: self.stage,
            Operation.WITHDRAW: self.withdraw,
            Operation.POLL: self.jobs.poll,
            Operation.UPDATE: self.update,
            Operation.PREPARE: self.prepare,
            Operation.COMMIT: self.commit,
            Operation.ABANDON: self.abandon,
            Operation.ROLLBACK: self.rollback,
            Operation.DECLARE_CURRENT: self.declare_current,
            Operation.LEAVE: self.leave,
            Operation.DIGESTS: self.digests,
            Operation.VERIFY: self.verify,
            Operation.KV_SCALES: self.kv_scales,
            Operation.MAY_SLEEP: self.may_sleep,
            Operation.NATIVE_INIT: self.native.init,
            Operation.NATIVE_SHUTDOWN: self.native.shutdown,
            Operation.NATIVE_START: self.native.start,
            Operation.NATIVE_UPDATE: self.native.update,
            Operation.NATIVE_FINISHING: self.native.finishing,
            Operation.NATIVE_FAILED: self.native.failed,
            Operation.NATIVE_RELABEL: self.native.relabel,
        }

    @errors_as_results
    def handle(self, operation: str, arguments: dict[str, Any]) -> Result:
        """Run an `Operation`, with what it takes by name."""
        self.tick()
        called = Operation(operation)
        if called.needs_weights and self.core.asleep():
            raise UpdateError("asleep", f"can't {operation}: the weights are asleep, wake the engine first")
        return self._operations[called](**arguments)

    def tick(self) -> None:
        """End what is over by now: updates, waits and pauses."""
        now = self._clock()
        for session in self.updates.sessions.values():
            if not self._preparation.under_way(session) and session.expire(now):
                self._end(session)
        self.committer.tick()
        self._check.tick()
        self.pauses.tick()

    def _busy(self) -> str | None:
        """Say why the shadow must not be written now, beside an update that is open."""
        if self._check.pending():
            return "what was exchanged last is being confirmed"
        return "a commit or a rollback waits for running requests" if self.committer.waits else None

    def join(self, chunk_bytes: int | None) -> Joined:
        """Know of one of several API server processes, which takes bodies of `chunk_bytes`."""
        if chunk_bytes is not None:
            self._chunk_bytes = min(chunk_bytes, self._chunk_bytes or chunk_bytes)
        return Joined(pids=self.core.pids)

    def change(self) -> dict[str, Any]:
        """Return what API server processes act upon as soon as it changes."""
        updating = self.updates.under_way
        epoch, poisoned = self.committer.live.epoch, self.committer.poisoned
        return {"epoch": epoch, "poisoned": poisoned, "update": updating.id if updating else None}

    def status(self) -> EngineStatus:
        """Describe what is served, and what stands by."""
        if self.core.settings.staging != "none":
            self._model.manifest()
        committer, updating = self.committer, self.updates.under_way
        state = "updating" if updating else "serving"
        if committer.poisoned:
            state = not_generating(committer.poisoned).kind
        return EngineStatus(
            **committer.live.served(),
            state="asleep" if self.core.asleep() else state,
            poisoned=committer.poisoned,
            update=updating.id if updating else None,
            previous_version=committer.previous.version if committer.previous else None,
            previous_epoch=committer.previous.epoch if committer.previous else None,
            scale_format=self.core.settings.scale_format,
            kv_scales=self.kv.describe(committer.live.epoch),
            kv_layers=self.kv.served.layers if self.kv.enabled else {},
            kv_traffic=self.kv.traffic,
            kv_cache_dtype=self.core.kv_cache_dtype,
            staging=self.core.settings.staging,
            stall_seconds=committer.stall_seconds,
            paused_seconds=self.pauses.seconds,
            compiled=self.core.compiled,
            twin_bytes=self._model.shadow_bytes,
            twin_kv_blocks=self._model.shadow_kv_blocks,
            last_update=self._commits.last,
            draft_acceptance=self.core.draft_acceptance(),
            totals=self.totals.as_dict(),
        )

    def manifest(self) -> ServedManifest:
        """Return what an update must bring."""
        return ServedManifest(manifest=self._model.manifest().as_dict())

    def open(self, **fields: Any) -> Result:
        """Open an update (`OpenRequest`); `Waiting` while the one that has its `id` is being committed."""
        session = self.updates.open(self._model.manifest(), OpenRequest(**fields), self._model.untried)
        if session.state is State.COMMITTING and self._check.pending():
            return self._commits.wait()
        return replace(session.describe(), group=self._group, max_chunk_bytes=self._chunk_bytes)

    def check(self, id: str) -> Lifetime:
        """Require that an update takes chunks; its lifetime begins again. Called before a long body is read, and while it
        is."""
        session = self.updates.get(id)
        session.require_alterable("send a chunk to")
        session.touch(self._clock())
        return Lifetime(seconds=session.lifetime)

    def stage(
        self,
        id: str,
        chunk: str,
        source: dict[str, Any],
        tensors: list[Any],
        size: int,
        sha256: str | None = None,
        group: str | None = None,
    ) -> Result:
        """Start to stage a chunk: `tensors` of `[name, shape, dtype, start, bytes]` in a `Source`; a job. `group`: id of the
        group of processes by which it comes, if any."""
        started = self._chunks.start(self.updates.get(id), chunk, source, tensors, size, sha256)
        self._group = group or self._group
        return started

    def withdraw(self, id: str, chunks: list[str], problem: dict[str, Any]) -> UpdateState:
        """Count staged chunks as not sent, because of a `problem` with their source."""
        session = self.updates.get(id)
        session.withdraw(chunks, problem)
        return session.describe()

    def update(self, id: str) -> UpdateState:
        """Describe an update."""
        return self.updates.get(id).describe()

    def prepare(self, id: str) -> Result:
        """Validate an update as a whole: complete, and its canary is finite on the shadow. A job unless that was done before;
        `Waiting` while another call does it, or commits it."""
        session = self.updates.get(id)
        self.committer.require_healing(session.partial)
        self.jobs.reap()
        session.touch(self._clock())
        if session.state in (State.PREPARED, State.COMMITTED):
            if session.state is State.PREPARED:
                session.check_base(self.committer.live.epoch)
            return session.describe()
        return self._start_preparing(session)

    def _start_preparing(self, session: Session, *, commit: bool = False) -> Result:
        if self._preparation.under_way(session):
            self._preparation.require_alive(session)
            return self._commits.wait()
        if session.state is State.COMMITTING:
            return self._commits.wait()
        session.check(self.committer.live.epoch)
        return self._preparation.start(session, partial(self._commits.commit, session) if commit else None)

    def commit(self, id: str, caller: str = "") -> Result:
        """Serve an update's weights from the next step on; `Waiting` while it waits. Idempotent. What nobody prepared is
        prepared first. A job, which ends when every rank was seen to serve what was prepared. Another `caller` meanwhile
        waits for the outcome."""
        self.updates.get(id)
        return self._commit_calls.call(id, caller)

    def _commit(self, id: str) -> Result:
        session = self.updates.get(id)
        if self._check.pending():
            return self._commits.wait()
        if session.state is not State.OPEN:
            return self.jobs.start(self._commits.commit(session))
        self.committer.stop_waiting(id)  # when a chunk came while it waited
        self.committer.require_healing(session.partial)
        self.jobs.reap()
        session.touch(self._clock())
        return self._start_preparing(session, commit=True)

    def abandon(self, id: str) -> UpdateState:
        """Give an update up; the served weights are as they were."""
        session = self.updates.get(id)
        if session.abandon():
            if session.busy:  # a chunk may wait for its tensors
                self.core.ranks(RankMethod.DROP, session.id)
            self._end(session)
        return session.describe()

    def _abandon_open(self) -> None:
        if self._check.pending():
            self.jobs.settle()
        updating = self.updates.under_way
        if updating is not None:
            self.abandon(updating.id)

    def _end(self, session: Session) -> None:
        """Count an update that ended without a commit, and let the engine go on."""
        self.totals.ended(session.state)
        self.committer.stop_waiting(session.id)
        self.committer.give_up(f"update {session.id}", writing=session.busy)
        self.native.closed(session)

    def rollback(self, running: str = Running.KEEP, wait_seconds: float | None = None) -> Result:
        """Serve the previous weights again, as a new epoch; `Waiting` while it waits. A job, which ends when every rank was
        seen to serve them."""
        self._model.manifest()
        return self.jobs.start(self._commits.roll_back(Running(running), wait_seconds))

    def declare_current(self, epoch: int, version: str | None = None, instance: str | None = None) -> Result:
        """Answer requests with what is loaded (`Committer.declare_current`); `Waiting` while a commit is confirmed."""
        self._model.manifest()
        self.updates.require_instance(instance)
        if self._check.pending():
            return self._commits.wait()
        before = self.committer.live
        self.committer.declare_current(epoch, version)
        self._fingerprints.relabel(before, self.committer.live)
        return self.status()

    def leave(self) -> Done:
        """Give up a rollback that waits for running requests: whoever has called until now calls no more."""
        self._commits.stop_rollback()
        return Done()

    def digests(self) -> Result:
        """Compute the digests of the served weights; a job."""
        self._model.manifest()
        return self.jobs.start(self._audits.digests())

    def verify(self) -> Result:
        """Compare what is served with what was committed; a job."""
        self._model.manifest()
        return self.jobs.start(self._audits.verify())

    def may_sleep(self) -> Done:
        """Require that nothing stands against giving memory back."""
        self.sleeping.require_allowed()
        return Done()

    def kv_scales(self) -> ServedScales:
        """Return the served scales of the FP8 KV cache, and how well they fitted."""
        if self.kv.enabled:
            self._model.manifest()
        scales = self.kv.report(self.committer.live.epoch)
        if scales is None:
            message = "no KV-cache scales: the KV cache is not FP8, or the server takes no updates"
            raise UpdateError("no-kv-scales", message, status=404)
        return scales
