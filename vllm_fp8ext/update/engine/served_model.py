# SPDX-License-Identifier: Apache-2.0
"""The served model as its ranks describe it: asked for once, before anything is done with it."""

import logging

from vllm_fp8ext.config import METHOD
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.canary import canary_of
from vllm_fp8ext.update.contract.manifest import Manifest, merge
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import RankDescription, all_of, raise_first
from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.kv_scales import KvEngine
from vllm_fp8ext.update.engine.verification import CommittedFingerprints

logger = logging.getLogger("vllm.fp8ext")


class ServedModel:
    """Manifest of the served model, and by rank its shadow's memory, once asked for.

    `untried`: kinds of layers for which prompts can't be run through new weights.
    """

    def __init__(
        self, core: Core, committer: Committer, kv: KvEngine, fingerprints: CommittedFingerprints
    ) -> None:
        self.shadow_bytes: list[int] = []
        self.shadow_kv_blocks = 0
        self.untried: tuple[str, ...] = ()
        self._core = core
        self._committer = committer
        self._kv = kv
        self._fingerprints = fingerprints
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        """Return what an update must bring. At first the ranks rehearse an update, and what they serve is fingerprinted.

        Raises:
            UpdateError: `updates-unavailable`; `asleep`, when nobody has asked before.
        """
        if self._manifest is None:
            core = self._core
            if core.quantization != METHOD:
                message = "this server was not started with --quantization blockfp8"
                raise UpdateError("updates-unavailable", message)
            if core.asleep():
                raise UpdateError("asleep", "the weights are asleep: wake the engine first")
            ranks = all_of(RankDescription, core.ranks(RankMethod.DESCRIBE))
            canary = canary_of(None, core.settings, core.vocabulary, core.longest_prompt)
            raise_first(core.ranks(RankMethod.WARM_UP, canary.prompts, canary.built_in))
            if self._kv.enabled:
                logger.info("fp8ext: KV-cache scales: %s", self._kv.served.summary(0))
            self._manifest = merge(rank.manifest for rank in ranks)
            self._fingerprints.keep(self._committer.live, [rank.fingerprint for rank in ranks], None)
            self.shadow_bytes = [rank.shadow_bytes for rank in ranks]
            self.shadow_kv_blocks = max(rank.shadow_kv_blocks for rank in ranks)
            self.untried = tuple(dict.fromkeys(kind for rank in ranks for kind in rank.untried))
        return self._manifest
