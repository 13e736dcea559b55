# SPDX-License-Identifier: Apache-2.0
"""The served model as its ranks describe it: asked for once, before anything is done with it."""

import logging

from vllm_fp8ext.config import METHOD
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.canary import canary_of
from vllm_fp8ext.update.contract.manifest import Manifest, merge
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import raise_first
from vllm_fp8ext.update.engine.committer import Core, ExchangeStep
from vllm_fp8ext.update.engine.jobs import Result
from vllm_fp8ext.update.engine.kv_scales import KvEngine
from vllm_fp8ext.update.engine.verification import Fingerprints

logger = logging.getLogger("vllm.fp8ext")


class ServedModel:
    """`cost`: what the twins take, once the ranks were asked."""

    def __init__(self, core: Core, step: ExchangeStep, kv: KvEngine, fingerprints: Fingerprints) -> None:
        self.cost: Result = {"twin_bytes": [], "twin_kv_blocks": 0}
        self._core = core
        self._step = step
        self._kv = kv
        self._fingerprints = fingerprints
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        """What an update must bring. At first the ranks rehearse an update, and the fingerprints of what they serve are kept.

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
            parts = core.ranks(RankMethod.DESCRIBE)
            raise_first(parts)
            own = canary_of(None, core.settings, core.vocabulary, core.longest_prompt)
            raise_first(core.ranks(RankMethod.REHEARSE, own.prompts, own.built_in))
            if self._kv.enabled:
                logger.info("fp8ext: KV-cache scales: %s", self._kv.served.summary(0))
            self._manifest = merge(Manifest.from_dict(part["manifest"]) for part in parts)
            self._fingerprints.keep(self._step.live, [part["fingerprint"] for part in parts], None)
            self.cost = {
                "twin_bytes": [part["twin_bytes"] for part in parts],
                "twin_kv_blocks": parts[0]["twin_kv_blocks"],
            }
        return self._manifest
