# SPDX-License-Identifier: Apache-2.0
"""That an exchange has left on every rank what was prepared."""

import time
from collections.abc import Callable
from functools import partial

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.labels import Label
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import raise_first
from vllm_fp8ext.update.engine.committer import Core, ExchangeStep
from vllm_fp8ext.update.engine.jobs import Jobs, Result
from vllm_fp8ext.update.engine.verification import Fingerprints


class Confirmation:
    """Found out beside requests, after each exchange, by the fingerprints of what is served. Meanwhile there is no other
    exchange."""

    def __init__(self, core: Core, jobs: Jobs, step: ExchangeStep, fingerprints: Fingerprints) -> None:
        self._core = core
        self._jobs = jobs
        self._step = step
        self._fingerprints = fingerprints
        self._since: float | None = None

    def start(self, done: Callable[[float], Result], failed: Callable[[], object]) -> Result:
        """Start to compare; returns a job. `done` makes its result, of the seconds that it took. Where a rank serves
        anything else, or does not say what, `failed` is called, and the engine poisoned."""
        self._since = time.monotonic()
        finish = partial(self._judge, self._step.live, self._since, done, failed)
        return self._jobs.start(RankMethod.FINGERPRINT, finish=finish)

    def pending(self) -> bool:
        """Whether it is under way, by what the ranks say now."""
        if self._since is not None:
            self._jobs.reap()
        return self._since is not None

    def tick(self) -> None:
        """End an engine of which a rank does not answer."""
        limit = self._core.settings.deadline_seconds
        if self._since is not None and time.monotonic() - self._since > limit and self.pending():
            self._core.end(f"what was exchanged was not confirmed within {limit:g} s")

    def _judge(
        self,
        served: Label,
        since: float,
        done: Callable[[float], Result],
        failed: Callable[[], object],
        results: list[Result],
    ) -> Result:
        self._since = None
        try:
            raise_first(results)
            self._fingerprints.require(served, [result["fingerprint"] for result in results])
        except UpdateError as error:
            failed()
            self._step.poison(str(error))
        return done(time.monotonic() - since)
