# SPDX-License-Identifier: Apache-2.0
"""Questions about the served weights: their digests, and whether they are those that were committed."""

import time

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kv_types import scale_digests
from vllm_fp8ext.update.contract.kv_merge import largest
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import Fingerprint, RankDigests, all_of
from vllm_fp8ext.update.contract.results import ServedDigests, Stale, VerifiedWeights
from vllm_fp8ext.update.contract.update_errors import NOT_CURRENT
from vllm_fp8ext.update.engine.committer import Committer
from vllm_fp8ext.update.engine.jobs import Flow, OnRanks
from vllm_fp8ext.update.engine.verification import CommittedFingerprints


class Audits:
    """Makes jobs. Their result is `Stale` where other weights came meanwhile."""

    def __init__(self, committer: Committer, fingerprints: CommittedFingerprints) -> None:
        self._committer = committer
        self._fingerprints = fingerprints

    def digests(self) -> Flow[ServedDigests | Stale]:
        """Compute the digests of what is served."""
        self._require_known()
        served, swaps = self._committer.live, self._committer.exchanges
        ranks = all_of(RankDigests, (yield OnRanks(RankMethod.DIGESTS)))
        if self._changed(swaps):
            return Stale()
        names: dict[str, dict[str, str]] = {}
        for each in ranks:
            for name, digest in each.digests.items():
                names.setdefault(name, {})[str(each.rank)] = digest
        return ServedDigests(
            **served.served(),
            digests=dict(sorted(names.items())),
            addresses=[each.addresses for each in ranks],
            kv_scales=scale_digests(largest([each.kv_scales for each in ranks])),
        )

    def verify(self) -> Flow[VerifiedWeights | Stale]:
        """Compare what is served with what was committed. What differs is served no longer.

        Raises:
            UpdateError: `weights-differ`, and the engine is poisoned; `poisoned`, `staging`.
        """
        self._require_known()
        served, swaps = self._committer.live, self._committer.exchanges
        started = time.perf_counter()
        marks = all_of(Fingerprint, (yield OnRanks(RankMethod.FINGERPRINT)))
        if self._changed(swaps):
            return Stale()
        try:
            self._fingerprints.require(served, [mark.fingerprint for mark in marks])
        except UpdateError as error:
            self._committer.condemn(str(error))
            raise
        return VerifiedWeights(**served.served(), ranks=len(marks), seconds=time.perf_counter() - started)

    def _require_known(self) -> None:
        poisoned = self._committer.poisoned
        if poisoned not in (None, NOT_CURRENT):
            raise UpdateError("poisoned", f"nobody knows what is served: {poisoned}", status=503)
        self._committer.require_whole()

    def _changed(self, swaps: int) -> bool:
        """Tell whether a swap was tried since there were `swaps`: what was read meanwhile may be half of each side."""
        self._require_known()
        return swaps != self._committer.exchanges
