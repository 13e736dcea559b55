# SPDX-License-Identifier: Apache-2.0
"""What becomes of an update between its last tensor and its commit: the rest is taken from live, fingerprints are taken, and
the canary sings."""

import time
from collections.abc import Callable
from functools import partial

from vllm_fp8ext.weights.canary import Canary, judge
from vllm_fp8ext.weights.exchange_step import ExchangeStep
from vllm_fp8ext.weights.jobs import Jobs, Result
from vllm_fp8ext.weights.rank_results import raise_first
from vllm_fp8ext.weights.session import Session


class Preparations:
    """Each is one job that goes on in another."""

    def __init__(self, jobs: Jobs, step: ExchangeStep, clock: Callable[[], float]) -> None:
        self._jobs = jobs
        self._step = step
        self._clock = clock

    def start(self, session: Session, canary: Canary) -> Result:
        """Prepare an update in which nothing is missing; returns a job."""
        mark = partial(self._mark, session, canary, session.revision, time.perf_counter())
        if not session.partial:
            return mark([])
        return self._jobs.start("keep_others", session.id, sorted(session.staged_names()), finish=mark)

    def _mark(
        self, session: Session, canary: Canary, revision: int, started: float, results: list[Result]
    ) -> Result:
        """Take the fingerprints of what is prepared."""
        raise_first(results)
        finish = partial(self._sing, session, canary, revision, started)
        return self._jobs.start("fingerprint", True, finish=finish)

    def _sing(
        self, session: Session, canary: Canary, revision: int, started: float, results: list[Result]
    ) -> Result:
        raise_first(results)
        session.fingerprints = [result["fingerprint"] for result in results]
        session.seconds["fingerprint"] = time.perf_counter() - started
        finish = partial(self._sung, session, canary, revision, started)
        return self._jobs.start("sing", canary.prompts, canary.built_in, finish=finish)

    def _sung(
        self, session: Session, canary: Canary, revision: int, started: float, results: list[Result]
    ) -> Result:
        raise_first(results)
        session.canary_perplexity = judge(canary, results)
        session.check(self._step.live.epoch)
        session.prepared(revision)
        session.touch(self._clock())
        session.seconds["prepare"] = time.perf_counter() - started
        return session.as_dict()
