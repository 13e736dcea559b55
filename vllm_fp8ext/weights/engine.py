# SPDX-License-Identifier: Apache-2.0
"""The update engine: one per engine core, between steps. Sessions in, calls to the ranks out.

Every operation returns at once; what takes long (staging, the canary, digests) is a job that the caller polls, and so is a
commit that waits for running requests. An operation never raises: it returns its result, or `{"error": …}`.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vllm_fp8ext.config import METHOD
from vllm_fp8ext.errors import UpdateError, described
from vllm_fp8ext.kv.asked import Asked
from vllm_fp8ext.kv.engine import KvEngine
from vllm_fp8ext.weights.audits import Audits
from vllm_fp8ext.weights.canary import Canary, canary_of
from vllm_fp8ext.weights.claims import Claim, opening_problems
from vllm_fp8ext.weights.exchange_step import Core, ExchangeStep
from vllm_fp8ext.weights.fingerprints import Fingerprints
from vllm_fp8ext.weights.jobs import Jobs, Result
from vllm_fp8ext.weights.labels import Label, default_version
from vllm_fp8ext.weights.manifest import Manifest, TensorSpec, merge
from vllm_fp8ext.weights.preparations import Preparations
from vllm_fp8ext.weights.rank_results import distinct, raise_first, summed
from vllm_fp8ext.weights.refusals import refusal
from vllm_fp8ext.weights.session import Running, Session, State
from vllm_fp8ext.weights.sleeping import Sleeping
from vllm_fp8ext.weights.totals import Totals

logger = logging.getLogger("vllm.fp8ext")

KEPT_SESSIONS = 16
POLL_SECONDS = 0.01
"""What a request that comes to an idle engine may wait for a poll."""
_ASLEEP = frozenset({"status", "kv_scales", "manifest", "update", "poll", "abandon", "may_sleep"})
"""Operations that touch no weights."""


class UpdateEngine:
    """State of live updates in one engine."""

    def __init__(self, core: Core, clock: Callable[[], float] = time.time) -> None:
        self.core = core
        self.totals = Totals()
        self.jobs = Jobs(core.ranks, lambda: 0.0 if core.unfinished() else POLL_SECONDS)
        self.kv = KvEngine(core, self.jobs)
        self.step = ExchangeStep(core, self.totals, self.kv)
        self.sessions: dict[str, Session] = {}
        self._canaries: dict[str, Canary] = {}
        self._asked: dict[str, Asked | None] = {}
        """What updates ask for their KV-cache scales."""
        self._inplace = core.settings.staging == "inplace"
        self._fingerprints = Fingerprints()
        self._preparations = Preparations(self.jobs, self.step, self.kv, clock)
        self._audits = Audits(self.jobs, self.step, self._fingerprints)
        self._clock = clock
        self._manifest: Manifest | None = None
        self._cost: Result = {"twin_bytes": [], "twin_kv_blocks": 0}
        self._last: Result | None = None
        self.sleeping = Sleeping(core, self.step, self.jobs, self._abandon_open)
        self._operations: dict[str, Callable[..., Result]] = {
            "status": self.status,
            "manifest": self.manifest,
            "open": self.open,
            "check": self.check,
            "stage": self.stage,
            "poll": self.jobs.poll,
            "update": self.update,
            "prepare": self.prepare,
            "commit": self.commit,
            "abandon": self.abandon,
            "rollback": self.rollback,
            "digests": self.digests,
            "verify": self.verify,
            "kv_scales": self.kv_scales,
            "may_sleep": self.sleeping.allowed,
        }

    @described
    def handle(self, operation: str, arguments: Result) -> Result:
        """Run one operation; errors come back described."""
        now = self._clock()
        for session in self.sessions.values():
            if session.expire(now):
                self._ended(session)
        self.step.tick()
        if operation not in _ASLEEP and self.core.asleep():
            raise UpdateError("asleep", f"can't {operation}: the weights are asleep, wake the engine first")
        return self._operations[operation](**arguments)

    def status(self) -> Result:
        """What is served, and what stands by."""
        if self.core.settings.staging != "none":
            self._known_manifest()
        step, updating = self.step, self._open_session()
        state = "poisoned" if step.poisoned else "updating" if updating else "serving"
        if self.core.asleep():
            state = "asleep"
        return {
            "epoch": step.live.epoch,
            "version": step.live.version,
            "state": state,
            "poisoned": step.poisoned,
            "update": updating.id if updating else None,
            "previous_version": step.previous.version if step.previous else None,
            "previous_epoch": step.previous.epoch if step.previous else None,
            "scale_format": self.core.settings.scale_format,
            "kv_scales": self.kv.describe(step.live.epoch),
            "kv_layers": self.kv.served.layers if self.kv.enabled else {},
            "kv_cache_dtype": self.core.kv_cache_dtype,
            "staging": self.core.settings.staging,
            "stall_seconds": step.stall_seconds,
            "compiled": self.core.compiled,
            **self._cost,
            "last_update": self._last,
            "totals": self.totals.as_dict(),
        }

    def manifest(self) -> Result:
        """What an update must bring."""
        return self._known_manifest().as_dict()

    def open(
        self,
        version: str | None = None,
        base_epoch: int | None = None,
        running: str = Running.KEEP,
        wait_seconds: float | None = None,
        partial: bool = False,
        tensors: Mapping[str, Any] | None = None,
        canary: Mapping[str, Any] | None = None,
        kv_scales: Mapping[str, Any] | None = None,
        id: str | None = None,
    ) -> Result:
        """Open an update. With an `id` that was opened before, that one is returned."""
        manifest = self._known_manifest()
        if id is not None and id in self.sessions:
            return self.sessions[id].as_dict()
        if partial and base_epoch is None:
            raise UpdateError("invalid-request", "a partial update needs base_epoch", status=422)
        self._require_healing(partial)
        settings = self.core.settings
        if self._inplace and running == Running.WAIT:
            message = (
                "staging inplace can't wait for requests while it overwrites what they run on: expected running keep, "
                "recompute or abort, found wait"
            )
            raise UpdateError("invalid-request", message, status=422)
        busy = self._open_session()
        if busy is not None:
            raise UpdateError("update-open", f"update {busy.id} is open: one at a time", open=busy.id)
        claims = {name: Claim.from_dict(claim) for name, claim in (tensors or {}).items()}
        problems = opening_problems(claims, manifest)
        if problems:
            raise refusal(problems)
        session = Session(
            id=id or uuid.uuid4().hex,
            version=version if version is not None else default_version(self.step.live.epoch + 1),
            running=Running(running),
            manifest=manifest,
            opened_at=self._clock(),
            lifetime=settings.upload_idle_seconds if self._inplace else settings.update_lifetime_seconds,
            base_epoch=base_epoch,
            wait_seconds=wait_seconds,
            partial=partial,
            claims=claims,
        )
        session.check_base(self.step.live.epoch)
        self._canaries[session.id] = canary_of(
            canary, self.core.settings, self.core.vocabulary, self.core.longest_prompt
        )
        self._asked[session.id] = self.kv.asked(kv_scales)
        self.sessions[session.id] = session
        for old in list(self.sessions)[:-KEPT_SESSIONS]:
            del self.sessions[old]
            self._canaries.pop(old, None)
            self._asked.pop(old, None)
        return session.as_dict()

    def check(self, id: str) -> Result:
        """Require that an update takes chunks, before a long body is read."""
        session = self._session(id)
        session.require_live("send a chunk to")
        session.touch(self._clock())
        return {}

    def stage(self, id: str, chunk: str, source: Result, tensors: list[Any], size: int) -> Result:
        """Start to stage a chunk: `tensors` of `[name, shape, dtype, start, bytes]` in a `Source`; returns a job."""
        session = self._session(id)
        self._require_healing(session.partial)
        self.jobs.reap()
        if self._inplace:
            self.step.require_running()
        specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype, *_ in tensors]
        session.receive(chunk, specs, size)
        session.touch(self._clock())
        self.step.lose_previous()
        names = session.manifest.tensors.keys() | session.manifest.scales_among(specs).keys()
        used = [tensor for tensor in tensors if tensor[0] in names]
        if self._inplace and used:
            self.step.hold(session.running)
        hashes = {name: claim.sha256 for name, claim in session.claims.items() if claim.sha256}
        wanted = {tensor[0]: hashes[tensor[0]] for tensor in used if tensor[0] in hashes}
        finish = partial(self._staged, session, chunk, time.perf_counter())
        return self.jobs.start("stage", session.id, source, used, wanted, finish=finish)

    def update(self, id: str) -> Result:
        """Where an update stands."""
        return self._session(id).as_dict()

    def prepare(self, id: str) -> Result:
        """Validate an update as a whole: complete, and its canary sings on the twin. A job unless that was done before."""
        session = self._session(id)
        self._require_healing(session.partial)
        self.jobs.reap()
        session.touch(self._clock())
        if session.state in (State.PREPARED, State.COMMITTED):
            if session.state is State.PREPARED:
                session.check_base(self.step.live.epoch)
            return session.as_dict()
        session.check(self.step.live.epoch)
        return self._preparations.start(session, self._canaries[session.id], self._asked[session.id])

    def commit(self, id: str) -> Result:
        """Serve an update's weights from the next step on; `{"waiting": requests}` while it waits. Idempotent. What nobody
        prepared is prepared first: that is a job, which ends in the commit."""
        session = self._session(id)
        if session.state is State.COMMITTED:
            return session.as_dict()
        if session.state is State.OPEN:
            return self.jobs.followed(self.prepare(id), partial(self.commit, id))
        session.require_prepared()
        self._require_healing(session.partial)
        session.check_base(self.step.live.epoch)
        session.touch(self._clock())
        label = Label(self.step.live.epoch + 1, session.version)
        try:
            asked = self._asked[session.id]
            scales = (
                replace(session.kv, epoch=label.epoch) if asked and asked.policy != "static" else session.kv
            )
            phases = self.step.run(
                *(session.id, label, session.running, session.wait_seconds, scales),
                cached=asked.cached if asked else "rescale",
            )
        except UpdateError:
            if self.step.poisoned:
                session.forget()
                if session.partial:
                    self.abandon(id)
            raise
        if phases is None:
            return {"waiting": self.core.unfinished()}
        self._fingerprints.keep(label, session.fingerprints, self.step.previous)
        session.seconds.update(phases)
        session.seconds["total"] = self._clock() - session.opened_at
        session.commit({"epoch": label.epoch, "version": label.version, "pause_seconds": phases["pause"]})
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
        session = self._session(id)
        if session.abandon():
            if session.busy:  # a chunk may wait for its tensors
                self.core.ranks("drop", session.id)
            self._ended(session)
        return session.as_dict()

    def _abandon_open(self) -> None:
        updating = self._open_session()
        if updating is not None:
            self.abandon(updating.id)

    def _ended(self, session: Session) -> None:
        """It ended without a commit."""
        self.totals.ended(session.state)
        self.step.stop_waiting(session.id)
        self.step.give_up(f"update {session.id}")

    def rollback(self, running: str = Running.KEEP, wait_seconds: float | None = None) -> Result:
        """Serve the previous weights again, as a new epoch; `{"waiting": requests}` while it waits."""
        self._known_manifest()
        if self.step.previous is None:
            raise UpdateError(
                "no-previous", "no previous weights: no update was committed, or a newer one was begun"
            )
        previous = self.step.previous
        label = Label(self.step.live.epoch + 1, previous.version)
        cached = self.core.settings.kv_scales.cached if self.core.settings.kv_scales else "rescale"
        phases = self.step.run("rollback", label, Running(running), wait_seconds, cached=cached)
        if phases is None:
            return {"waiting": self.core.unfinished()}
        self._fingerprints.keep(label, self._fingerprints.of(previous), self.step.previous)
        self.totals.ended("rolled-back")
        self.totals.took(phases)
        return {"epoch": label.epoch, "version": label.version, "seconds": phases}

    def digests(self) -> Result:
        """Start to compute the digests of the served weights; returns a job."""
        self._known_manifest()
        return self._audits.digests()

    def verify(self) -> Result:
        """Start to compare what is served with what was committed; returns a job."""
        self._known_manifest()
        return self._audits.verify()

    def kv_scales(self) -> Result:
        """The scales of the FP8 KV cache that is served, and how well they fitted."""
        if self.kv.enabled:
            self._known_manifest()
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
        session.touch(self._clock())
        session.took_staging(started, time.perf_counter())
        if errors:
            raise UpdateError.from_dict(errors[0])
        if problems:
            raise refusal(problems)
        return {"update": session.as_dict()}

    def _known_manifest(self) -> Manifest:
        if self._manifest is None:
            if self.core.quantization != METHOD:
                raise UpdateError(
                    "updates-unavailable", "this server was not started with --quantization blockfp8"
                )
            if self.core.asleep():
                raise UpdateError("asleep", "the weights are asleep: wake the engine first")
            parts = self.core.ranks("describe")
            raise_first(parts)
            own = canary_of(None, self.core.settings, self.core.vocabulary, self.core.longest_prompt)
            raise_first(self.core.ranks("rehearse", own.prompts, own.built_in))
            if self.kv.enabled:
                logger.info("fp8ext: KV-cache scales: %s", self.kv.served.summary(0))
            self._manifest = merge(Manifest.from_dict(part["manifest"]) for part in parts)
            self._fingerprints.keep(self.step.live, [part["fingerprint"] for part in parts], None)
            self._cost = {
                "twin_bytes": [part["twin_bytes"] for part in parts],
                "twin_kv_blocks": parts[0]["twin_kv_blocks"],
            }
        return self._manifest

    def _require_healing(self, partial: bool) -> None:
        if partial and self.step.poisoned:
            raise UpdateError("poisoned", "only a full update heals a poisoned engine", status=503)

    def _session(self, id: str) -> Session:
        session = self.sessions.get(id)
        if session is None:
            raise UpdateError("unknown-update", f"no update {id}", status=404)
        return session

    def _open_session(self) -> Session | None:
        return next((session for session in self.sessions.values() if session.live), None)
