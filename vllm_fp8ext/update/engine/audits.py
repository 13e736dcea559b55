# SPDX-License-Identifier: Apache-2.0
"""Questions about what is served: its digests, and whether it is what was committed."""

import time
from functools import partial

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kv_types import scale_digests
from vllm_fp8ext.update.contract.kv_merge import largest
from vllm_fp8ext.update.contract.labels import Label
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import raise_first
from vllm_fp8ext.update.engine.committer import ExchangeStep
from vllm_fp8ext.update.engine.jobs import Jobs, Result
from vllm_fp8ext.update.engine.verification import Fingerprints


class Audits:
    """Each is a job. `{"stale": True}`: other weights came meanwhile, ask again."""

    def __init__(self, jobs: Jobs, step: ExchangeStep, fingerprints: Fingerprints) -> None:
        self._jobs = jobs
        self._step = step
        self._fingerprints = fingerprints

    def digests(self) -> Result:
        """Start to compute the digests of what is served."""
        self._require_known()
        return self._jobs.start(
            RankMethod.DIGESTS, finish=partial(self._digested, self._step.live, self._step.exchanges)
        )

    def verify(self) -> Result:
        """Start to compare what is served with what was committed."""
        self._require_known()
        served, exchanges = self._step.live, self._step.exchanges
        finish = partial(self._verified, served, exchanges, time.perf_counter())
        return self._jobs.start(RankMethod.FINGERPRINT, finish=finish)

    def _require_known(self) -> None:
        if self._step.poisoned is not None:
            raise UpdateError("poisoned", f"nobody knows what is served: {self._step.poisoned}", status=503)
        self._step.require_whole()

    def _verified(self, served: Label, exchanges: int, started: float, results: list[Result]) -> Result:
        raise_first(results)
        if self._changed(exchanges):
            return {"stale": True}
        found = [result["fingerprint"] for result in results]
        self._fingerprints.require(served, found)
        return {
            **served.served(),
            "ranks": len(found),
            "seconds": time.perf_counter() - started,
        }

    def _changed(self, exchanges: int) -> bool:
        """Whether an exchange was tried since there were so many: what was read meanwhile may be half of each side."""
        self._require_known()
        return exchanges != self._step.exchanges

    def _digested(self, served: Label, exchanges: int, results: list[Result]) -> Result:
        raise_first(results)
        if self._changed(exchanges):
            return {"stale": True}
        names: dict[str, dict[str, str]] = {}
        for result in results:
            for name, value in result["digests"].items():
                names.setdefault(name, {})[str(result["rank"])] = value
        return {
            **served.served(),
            "digests": dict(sorted(names.items())),
            "addresses": [result["addresses"] for result in results],
            "kv_scales": scale_digests(largest([result["kv_scales"] for result in results])),
        }
