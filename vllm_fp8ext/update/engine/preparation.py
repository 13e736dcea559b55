# SPDX-License-Identifier: Apache-2.0
"""Preparation of an update, between its last tensor and its commit."""

import time
from collections.abc import Callable

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.canary import judge
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import CanaryScore, Fingerprint, all_of, raise_first
from vllm_fp8ext.update.contract.results import JobStarted, Result, UpdateState
from vllm_fp8ext.update.engine.committer import Committer
from vllm_fp8ext.update.engine.jobs import Flow, Jobs, OnRanks
from vllm_fp8ext.update.engine.kv_scales import KvEngine
from vllm_fp8ext.update.engine.session import Session
from vllm_fp8ext.update.engine.timestamp import Moment


class Preparation:
    """Prepares updates, each once at a time. `deadline`: seconds within which the ranks do something for it."""

    def __init__(
        self, jobs: Jobs, committer: Committer, kv: KvEngine, clock: Callable[[], Moment], deadline: float
    ) -> None:
        self._jobs = jobs
        self._kv = kv
        self._committer = committer
        self._clock = clock
        self._deadline = deadline
        self._under_way: dict[str, int] = {}
        """The job of each, by the update's id."""

    def under_way(self, session: Session) -> bool:
        """Tell whether an update is being prepared."""
        return session.id in self._under_way

    def require_alive(self, session: Session) -> None:
        """Require that the preparation under way is worth waiting for.

        Raises:
            UpdateError: `engine-timeout`.
        """
        if self._jobs.silence(self._under_way[session.id]) > self._deadline:
            message = f"update {session.id} is being prepared, and nothing was done for {self._deadline:g} s"
            raise UpdateError("engine-timeout", message, status=504)

    def start(self, session: Session, then: Callable[[], Flow[Result]] | None = None) -> Result:
        """Prepare an update in which nothing is missing, as a job; `then` goes on in the same job."""
        started = self._jobs.start(self._run(session, then))
        if isinstance(started, JobStarted) and session.id in self._under_way:
            self._under_way[session.id] = started.job
        return started

    def _run(self, session: Session, then: Callable[[], Flow[Result]] | None) -> Flow[Result]:
        self._under_way[session.id] = 0  # `start` knows the job
        try:
            state = yield from self._prepare(session)
        finally:
            del self._under_way[session.id]
            session.touch(self._clock())
        return state if then is None else (yield from then())

    def _prepare(self, session: Session) -> Flow[UpdateState]:
        """Fill in the served weights, scale the KV cache, take fingerprints, run the canary."""
        revision, started = session.revision, time.perf_counter()
        if session.partial:
            names = sorted(session.written())
            raise_first((yield OnRanks(RankMethod.COPY_UNSENT, session.id, names)))
            session.require_unchanged(revision)
        yield from self._find_scales(session, revision)
        scores = yield from self._take_fingerprints(session)
        if scores is None:
            results = yield OnRanks(RankMethod.RUN_CANARY, session.canary.prompts)
            scores = all_of(CanaryScore, results)
        session.canary_perplexity = judge(session.canary, scores)
        session.check(self._committer.live.epoch)
        session.prepared(revision)
        session.took("prepare", started, time.perf_counter())
        return session.describe()

    def _find_scales(self, session: Session, revision: int) -> Flow[None]:
        """Give the shadow the scales of its KV cache, where there is one."""
        if session.kv_request is None:
            return
        started, epoch = time.perf_counter(), self._committer.live.epoch + 1

        def require_wanted() -> None:
            session.require_unchanged(revision)

        session.kv = yield from self._kv.prepare(session.kv_request, epoch, require_wanted)
        session.kv_scales = session.kv.summary(epoch)
        session.seconds["kv_scales"] = time.perf_counter() - started

    def _take_fingerprints(self, session: Session) -> Flow[list[CanaryScore] | None]:
        """Keep the fingerprints of what is prepared; returns the canary's scores where it ran in the same step."""
        marks = all_of(Fingerprint, (yield OnRanks(RankMethod.FINGERPRINT_SHADOW, session.canary.built_in)))
        session.fingerprints = [mark.fingerprint for mark in marks]
        session.seconds["fingerprint"] = max(mark.seconds for mark in marks)
        scores = [mark.canary for mark in marks if mark.canary is not None]
        return scores if len(scores) == len(marks) else None
