# SPDX-License-Identifier: Apache-2.0
"""What becomes of an update between its last tensor and its commit: the rest is taken from live, scales of the KV cache
are found, fingerprints are taken, and the canary sings."""

import time
from collections.abc import Callable
from functools import partial

from vllm_fp8ext.errors import UpdateError, described
from vllm_fp8ext.update.contract.canary import judge
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import raise_first
from vllm_fp8ext.update.engine.committer import ExchangeStep
from vllm_fp8ext.update.engine.jobs import Jobs, Result
from vllm_fp8ext.update.engine.kv_scales import KvEngine, ScaleSet
from vllm_fp8ext.update.engine.session import Session
from vllm_fp8ext.update.engine.timestamp import Moment


class Preparations:
    """Each is one job that goes on in another; of an update there is one at a time. `deadline`: seconds in which ranks do
    something for it."""

    def __init__(
        self, jobs: Jobs, step: ExchangeStep, kv: KvEngine, clock: Callable[[], Moment], deadline: float
    ) -> None:
        self._jobs = jobs
        self._kv = kv
        self._step = step
        self._clock = clock
        self._deadline = deadline
        self._under_way: dict[str, int] = {}
        """The job of each, by the update's id."""

    def under_way(self, session: Session) -> bool:
        """Whether an update is being prepared."""
        return session.id in self._under_way

    def require_alive(self, session: Session) -> None:
        """Require that it is worth to wait for the one under way.

        Raises:
            UpdateError: `engine-timeout`.
        """
        if self._jobs.silence(self._under_way[session.id]) > self._deadline:
            message = f"update {session.id} is being prepared, and nothing was done for {self._deadline:g} s"
            raise UpdateError("engine-timeout", message, status=504)

    def start(self, session: Session) -> Result:
        """Prepare an update in which nothing is missing; returns a job."""
        return self._jobs.watched(described(self._begin)(session), partial(self._moved, session))

    def _moved(self, session: Session, job: int | None) -> None:
        if job is None:
            self._under_way.pop(session.id, None)
            session.touch(self._clock())
        else:
            self._under_way[session.id] = job

    def _begin(self, session: Session) -> Result:
        scale = partial(self._scale, session, session.revision, time.perf_counter())
        if not session.partial:
            return scale([])
        return self._jobs.start(
            RankMethod.KEEP_OTHERS, session.id, sorted(session.staged_names()), finish=scale
        )

    def _scale(self, session: Session, revision: int, started: float, results: list[Result]) -> Result:
        """Find the scales of its KV cache."""
        raise_first(results)
        session.require_unchanged(revision)
        now = time.perf_counter()
        mark = partial(self._mark, session, revision, started)
        if session.asked is None:
            return mark()
        epoch = self._step.live.epoch + 1

        def done(found: ScaleSet) -> None:
            session.kv = found
            session.kv_scales = found.summary(epoch)
            session.seconds["kv_scales"] = time.perf_counter() - now

        wanted = partial(session.require_unchanged, revision)
        return self._kv.prepare(session.asked, epoch, wanted, done, mark)

    def _mark(self, session: Session, revision: int, started: float) -> Result:
        """Take the fingerprints of what is prepared."""
        finish = partial(self._sing, session, revision, started)
        return self._jobs.start(RankMethod.MARK, session.canary.built_in, finish=finish)

    def _sing(self, session: Session, revision: int, started: float, results: list[Result]) -> Result:
        """Let the canary sing, where it has not done so already."""
        raise_first(results)
        session.fingerprints = [result["fingerprint"] for result in results]
        session.seconds["fingerprint"] = max(result["seconds"] for result in results)
        finish = partial(self._sung, session, revision, started)
        if all("finite" in result for result in results):
            return finish(results)
        return self._jobs.start(RankMethod.RUN_CANARY, session.canary.prompts, finish=finish)

    def _sung(self, session: Session, revision: int, started: float, results: list[Result]) -> Result:
        raise_first(results)
        session.canary_perplexity = judge(session.canary, results)
        session.check(self._step.live.epoch)
        session.prepared(revision)
        session.took("prepare", started, time.perf_counter())
        return session.as_dict()
