# SPDX-License-Identifier: Apache-2.0
"""Proof that a swap has left on every rank what was prepared."""

import time
from collections.abc import Callable

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import Fingerprint, all_of
from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.jobs import Flow, Jobs, OnRanks
from vllm_fp8ext.update.engine.verification import CommittedFingerprints


class CommitCheck:
    """Compares fingerprints of what is served after each swap, beside requests. Meanwhile there is no other swap."""

    def __init__(
        self, core: Core, jobs: Jobs, committer: Committer, fingerprints: CommittedFingerprints
    ) -> None:
        self._core = core
        self._jobs = jobs
        self._committer = committer
        self._fingerprints = fingerprints
        self._since: float | None = None

    def run(self, failed: Callable[[], object]) -> Flow[float]:
        """Compare; returns the seconds that this took. `failed` is called before the engine is poisoned.

        Raises:
            UpdateError: `poisoned`: a rank serves anything else, or does not say what.
        """
        self._since = since = time.monotonic()
        served = self._committer.live
        results = yield OnRanks(RankMethod.FINGERPRINT)
        self._since = None
        try:
            marks = all_of(Fingerprint, results)
            self._fingerprints.require(served, [mark.fingerprint for mark in marks])
        except UpdateError as error:
            failed()
            self._committer.poison(str(error))
        return time.monotonic() - since

    def pending(self) -> bool:
        """Tell whether a comparison is under way, by what the ranks say now."""
        if self._since is not None:
            self._jobs.reap()
        return self._since is not None

    def tick(self) -> None:
        """End an engine of which a rank does not answer."""
        limit = self._core.settings.deadline_seconds
        if self._since is not None and time.monotonic() - self._since > limit and self.pending():
            self._core.end(f"what was exchanged was not confirmed within {limit:g} s")
