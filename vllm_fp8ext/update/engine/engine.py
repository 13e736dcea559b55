# SPDX-License-Identifier: Apache-2.0
"""The update engine: one per engine core, between steps. Sessions in, calls to the ranks out.

Every operation returns at once; what takes long (staging, the canary, digests) is a job that the caller polls, and so is a
commit that waits for running requests. An operation never raises: it returns its result, or `{"error": …}`.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from vllm_fp8ext.errors import UpdateError, described
from vllm_fp8ext.update.contract.fused import taken_apart
from vllm_fp8ext.update.contract.labels import Label, default_version
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.operations import Operation, RankMethod
from vllm_fp8ext.update.contract.rank_results import distinct, summed
from vllm_fp8ext.update.contract.update_errors import refusal
from vllm_fp8ext.update.engine.audits import Audits
from vllm_fp8ext.update.engine.commit_check import Confirmation
from vllm_fp8ext.update.engine.committer import Core, ExchangeStep
from vllm_fp8ext.update.engine.jobs import Jobs, Result
from vllm_fp8ext.update.engine.kv_scales import KvEngine
from vllm_fp8ext.update.engine.preparation import Preparations
from vllm_fp8ext.update.engine.served_model import ServedModel
from vllm_fp8ext.update.engine.session import Running, Session, State
from vllm_fp8ext.update.engine.sleeping import Sleeping
from vllm_fp8ext.update.engine.timestamp import Moment
from vllm_fp8ext.update.engine.totals import Totals
from vllm_fp8ext.update.engine.updates import Updates
from vllm_fp8ext.update.engine.verification import Fingerprints

ROLLBACK = "rollback"
"""By what a rollback waits, beside the ids of updates."""
POLL_SECONDS = 0.01
"""What a request that comes to an idle engine may wait for a poll."""


class UpdateEngine:
    """State of live updates in one engine."""

    def __init__(self, core: Core, clock: Callable[[], Moment] = Moment.now) -> None:
        self.core = core
        self.totals = Totals()
        self.jobs = Jobs(
            core.ranks, lambda: 0.0 if core.unfinished() else POLL_SECONDS, lambda why: core.end(why)
        )
        self.kv = KvEngine(core, self.jobs)
        self.step = ExchangeStep(core, self.totals, self.kv)
        self.updates = Updates(core, self.step, self.kv, clock)
        self._inplace = core.settings.staging == "inplace"
        self._fingerprints = Fingerprints()
        self._model = ServedModel(core, self.step, self.kv, self._fingerprints)
        self._preparations = Preparations(
            self.jobs, self.step, self.kv, clock, core.settings.deadline_seconds
        )
        self._audits = Audits(self.jobs, self.step, self._fingerprints)
        self._confirmation = Confirmation(core, self.jobs, self.step, self._fingerprints)
        self._clock = clock
        self._last: Result | None = None
        self.sleeping = Sleeping(core, self.step, self.jobs, self._abandon_open)
        self._operations: dict[Operation, Callable[..., Result]] = {
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
            Operation.LEAVE: self.leave,
            Operation.DIGESTS: self.digests,
            Operation.VERIFY: self.verify,
            Operation.KV_SCALES: self.kv_scales,
            Operation.MAY_SLEEP: self.sleeping.allowed,
        }

    @described
    def handle(self, operation: str, arguments: Result) -> Result:
        """Run one operation; errors come back described."""
        now = self._clock()
        for session in self.updates.sessions.values():
            if not self._preparations.under_way(session) and session.expire(now):
                self._ended(session)
        self.step.tick()
        self._confirmation.tick()
        called = Operation(operation)
        if called.needs_weights and self.core.asleep():
            raise UpdateError("asleep", f"can't {operation}: the weights are asleep, wake the engine first")
        return self._operations[called](**arguments)

    def status(self) -> Result:
        """What is served, and what stands by."""
        if self.core.settings.staging != "none":
            self._model.manifest()
        step, updating = self.step, self.updates.under_way
        state = "poisoned" if step.poisoned else "updating" if updating else "serving"
        if self.core.asleep():
            state = "asleep"
        return {
            **step.live.served(),
            "state": state,
            "poisoned": step.poisoned,
            "update": updating.id if updating else None,
            "previous_version": step.previous.version if step.previous else None,
            "previous_epoch": step.previous.epoch if step.previous else None,
            "scale_format": self.core.settings.scale_format,
            "kv_scales": self.kv.describe(step.live.epoch),
            "kv_layers": self.kv.served.layers if self.kv.enabled else {},
            "kv_traffic": self.kv.traffic,
            "kv_cache_dtype": self.core.kv_cache_dtype,
            "staging": self.core.settings.staging,
            "stall_seconds": step.stall_seconds,
            "compiled": self.core.compiled,
            **self._model.cost,
            "last_update": self._last,
            "totals": self.totals.as_dict(),
        }

    def manifest(self) -> Result:
        """What an update must bring."""
        return self._model.manifest().as_dict()

    def open(self, **asked: Any) -> Result:
        """Open an update (`Updates.open`); `{"waiting": requests}` while the one that has its `id` is being committed."""
        session = self.updates.open(self._model.manifest(), **asked)
        if session.state is State.COMMITTING and self._confirmation.pending():
            return self._wait()
        return session.as_dict()

    def check(self, id: str) -> Result:
        """Require that an update takes chunks, before a long body is read and while it is; its `lifetime` begins again."""
        session = self.updates.get(id)
        session.require_alterable("send a chunk to")
        session.touch(self._clock())
        return {"lifetime": session.lifetime}

    def stage(
        self,
        id: str,
        chunk: str,
        source: Result,
        tensors: list[Any],
        size: int,
        sha256: str | None = None,
    ) -> Result:
        """Start to stage a chunk: `tensors` of `[name, shape, dtype, start, bytes]` in a `Source`; returns a job, and, where
        that is known, in how many seconds it ends at the `soonest`."""
        session = self.updates.get(id)
        self.step.require_healing(session.partial)
        self.jobs.reap()
        if self._inplace:
            self.step.require_running()
            self.step.require_recomputable(session.running, session.cached)
        manifest = session.manifest
        tensors, sent = _canonical(tensors, manifest)
        specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype, *_ in tensors]
        session.receive(chunk, specs, size, sha256, sent)
        session.touch(self._clock())
        self.step.lose_previous()
        names = manifest.tensors.keys() | manifest.fused.keys() | manifest.tied.keys()
        names |= manifest.scales_among(specs).keys()
        used = [tensor for tensor in tensors if tensor[0] in names]
        if self._inplace and used:
            self.step.hold(session.running)
        claimed = {name: claim.sha256 for name, claim in session.claims.items() if claim.sha256}
        hashes = {name: [claimed[name], manifest.parts([name])] for name, *_ in used if name in claimed}
        finish = partial(self._staged, session, chunk, time.perf_counter())
        used_bytes = sum(tensor[4] for tensor in used)
        used = taken_apart(used, manifest.fused)
        beside = self.core.unfinished() > 0 and not self._inplace
        rate = self.core.settings.busy_staging_rate if beside else 0.0
        beside_it = session.tied_in_others(chunk)
        started = self.jobs.start(
            RankMethod.STAGE, session.id, source, used, hashes, rate, beside_it, finish=finish
        )
        if rate and "job" in started:
            started["soonest"] = used_bytes / (rate * manifest.world_size)
        return started

    def withdraw(self, id: str, chunks: list[str], problem: Result) -> Result:
        """Chunks that were staged count as not sent any more, because of a `problem` with where they came from."""
        session = self.updates.get(id)
        session.withdraw(chunks, problem)
        return session.as_dict()

    def update(self, id: str) -> Result:
        """Where an update stands."""
        return self.updates.get(id).as_dict()

    def prepare(self, id: str) -> Result:
        """Validate an update as a whole: complete, and its canary sings on the twin. A job unless that was done before;
        `{"waiting": requests}` while another call does it, or commits it."""
        session = self.updates.get(id)
        self.step.require_healing(session.partial)
        self.jobs.reap()
        session.touch(self._clock())
        if session.state in (State.PREPARED, State.COMMITTED):
            if session.state is State.PREPARED:
                session.check_base(self.step.live.epoch)
            return session.as_dict()
        if self._preparations.under_way(session):
            self._preparations.require_alive(session)
            return self._wait()
        if session.state is State.COMMITTING:
            return self._wait()
        session.check(self.step.live.epoch)
        return self._preparations.start(session)

    def commit(self, id: str) -> Result:
        """Serve an update's weights from the next step on; `{"waiting": requests}` while it waits. Idempotent. What nobody
        prepared is prepared first. A job, which ends when every rank was seen to serve what was prepared."""
        session = self.updates.get(id)
        if self._confirmation.pending():
            return self._wait()
        if session.state is State.COMMITTED:
            return session.as_dict()
        if session.state is State.OPEN:
            self.step.stop_waiting(id)  # when a chunk came while it waited
            started = self.prepare(id)
            return started if "waiting" in started else self.jobs.followed(started, partial(self.commit, id))
        session.require_prepared()
        self.step.require_healing(session.partial)
        session.check_base(self.step.live.epoch)
        session.touch(self._clock())
        label = self.step.live.next(session.version, aborts=session.running is Running.ABORT)
        try:
            asked = session.asked
            scales = (
                replace(session.kv, epoch=label.epoch) if asked and asked.policy != "static" else session.kv
            )
            phases = self.step.run(
                *(session.id, label, session.running, session.wait_seconds, scales),
                cached=session.cached,
            )
        except UpdateError:
            if self.step.poisoned:
                self._lost(session)
            raise
        if phases is None:
            return self._wait()
        self._fingerprints.keep(label, session.fingerprints, self.step.previous)
        session.exchanged()
        session.took("pause", *self.step.paused)
        session.seconds.update(phases)
        return self._confirmation.start(
            partial(self._committed, session, label), partial(self._lost, session)
        )

    def _wait(self) -> Result:
        """What a call answers that is to come again."""
        return {"waiting": self.core.unfinished()}

    def _lost(self, session: Session) -> None:
        """Its commit failed half-way: nobody knows what is served."""
        session.forget()
        if session.partial:
            self.abandon(session.id)

    def _committed(self, session: Session, label: Label, seconds: float) -> Result:
        now = time.perf_counter()
        session.took("verify", now - seconds, now)
        session.ended_at(now)
        session.commit({**label.served(), "pause_seconds": session.seconds["pause"]})
        session.kv_scales = self.kv.describe(label.epoch)
        self.totals.ended(session.state)
        self.totals.took(session.seconds)
        self.totals.bytes += session.bytes
        self._last = {
            "id": session.id,
            "bytes": session.bytes,
            "seconds": dict(session.seconds),
            "quantization_error": session.quantization_error,
        }
        return session.as_dict()

    def abandon(self, id: str) -> Result:
        """Give an update up; the served weights are as they were."""
        session = self.updates.get(id)
        if session.abandon():
            if session.busy:  # a chunk may wait for its tensors
                self.core.ranks(RankMethod.DROP, session.id)
            self._ended(session)
        return session.as_dict()

    def _abandon_open(self) -> None:
        if self._confirmation.pending():
            self.jobs.settle()
        updating = self.updates.under_way
        if updating is not None:
            self.abandon(updating.id)

    def _ended(self, session: Session) -> None:
        """It ended without a commit."""
        self.totals.ended(session.state)
        self.step.stop_waiting(session.id)
        self.step.give_up(f"update {session.id}", writing=session.busy)

    def rollback(self, running: str = Running.KEEP, wait_seconds: float | None = None) -> Result:
        """Serve the previous weights again, as a new epoch; `{"waiting": requests}` while it waits. A job, which ends when
        every rank was seen to serve them."""
        self._model.manifest()
        if self._confirmation.pending():
            return self._wait()
        if self.step.previous is None:
            self.step.stop_waiting(ROLLBACK)  # when a chunk came while it waited
            raise UpdateError(
                "no-previous",
                "no previous weights: no update was committed, or a newer one was begun, even if it was refused",
            )
        previous = self.step.previous
        label = self.step.live.next(previous.version, aborts=running == Running.ABORT)
        cached = self.core.settings.kv_scales.cached if self.core.settings.kv_scales else "rescale"
        phases = self.step.run(ROLLBACK, label, Running(running), wait_seconds, cached=cached)
        if phases is None:
            return self._wait()
        self._fingerprints.keep(label, self._fingerprints.of(previous), self.step.previous)
        updating = self.updates.under_way
        if updating is not None and not updating.named:
            updating.version = default_version(label.epoch + 1)
        return self._confirmation.start(partial(self._rolled_back, label, phases), lambda: None)

    def leave(self) -> Result:
        """Whoever has called until now calls no more: a rollback that waits for running requests is given up."""
        self.step.stop_waiting(ROLLBACK)
        return {}

    def _rolled_back(self, label: Label, phases: dict[str, float], seconds: float) -> Result:
        phases["verify"] = seconds
        self.totals.ended("rolled-back")
        self.totals.took(phases)
        return {**label.served(), "seconds": phases}

    def digests(self) -> Result:
        """Start to compute the digests of the served weights; returns a job."""
        self._model.manifest()
        return self._audits.digests()

    def verify(self) -> Result:
        """Start to compare what is served with what was committed; returns a job."""
        self._model.manifest()
        return self._audits.verify()

    def kv_scales(self) -> Result:
        """The scales of the FP8 KV cache that is served, and how well they fitted."""
        if self.kv.enabled:
            self._model.manifest()
        found = self.kv.describe(self.step.live.epoch, layers=True)
        if found is None:
            message = "no KV-cache scales: the KV cache is not FP8, or the server takes no updates"
            raise UpdateError("no-kv-scales", message, status=404)
        return found

    def _staged(self, session: Session, chunk: str, started: float, results: list[Result]) -> Result:
        errors = [result["error"] for result in results if "error" in result]
        problems = distinct([problem for result in results for problem in result.get("problems", ())])
        told = dict.fromkeys((error["kind"], error["message"]) for error in errors)
        faults = [{"kind": kind, "detail": message} for kind, message in told]
        session.staged(chunk, problems + faults, summed(results))
        if not all(result.get("untouched") for result in results):
            self.step.wrote()
        session.touch(self._clock())
        session.took_staging(started, time.perf_counter())
        if errors:
            raise UpdateError.from_dict(errors[0])
        if problems:
            raise refusal(problems)
        return {"update": session.as_dict()}


def _canonical(tensors: list[Any], manifest: Manifest) -> tuple[list[Any], dict[str, str]]:
    """Tensors, each a list that begins with its name, under the manifest's names; and by these, the names that were sent."""
    if not manifest.aliases:
        return tensors, {}
    known = [manifest.canonical(name) for name, *_ in tensors]
    sent = {name: tensor[0] for name, tensor in zip(known, tensors, strict=True) if name != tensor[0]}
    return [[name, *tensor[1:]] for name, tensor in zip(known, tensors, strict=True)], sent
