# SPDX-License-Identifier: Apache-2.0
"""Combinations with vLLM's own settings that blockfp8 refuses at start, each with its reason."""

import os
from typing import Any

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError


def refuse_unsupported(config: Any, settings: Settings) -> None:
    """Raises `ConfigError` naming everything in a `VllmConfig` that can't be served, or not be updated live."""
    parallel = config.parallel_config
    reasons = []
    if parallel.pipeline_parallel_size > 1:
        reasons.append("--pipeline-parallel-size > 1: an exchange spans tensor-parallel ranks only")
    if parallel.data_parallel_size > 1:
        reasons.append("--data-parallel-size > 1: run one server per replica, each takes its own updates")
    if getattr(parallel, "_api_process_count", 1) > 1:
        reasons.append("--api-server-count > 1: the parts of one update would reach different processes")
    if parallel.enable_eplb:
        reasons.append("--enable-eplb: experts move between ranks under the update")
    if config.lora_config is not None:
        reasons.append("--enable-lora: adapters are not part of an update")
    if config.speculative_config is not None:
        reasons.append("--speculative-config: a draft model would keep its old weights")
    if config.kv_transfer_config is not None:
        reasons.append("--kv-transfer-config: K and V of other weights could come back through a connector")
    offload = getattr(config, "offload_config", None)
    if offload is not None and _offloads(offload):
        reasons.append("CPU offload: offloaded weights have no address to exchange")
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        reasons.append("VLLM_SERVER_DEV_MODE=1: it opens weight routes that need no key")
    if reasons and settings.staging != "none":
        raise ConfigError(
            "blockfp8 with live updates can't be combined with:\n  "
            + "\n  ".join(reasons)
            + '\nWithout live updates (--additional-config \'{"fp8ext": {"staging": "none"}}\') they are not refused.'
        )


def _offloads(offload: Any) -> bool:
    uva = getattr(offload, "uva", None)
    prefetch = getattr(offload, "prefetch", None)
    return bool(getattr(uva, "cpu_offload_gb", 0) or getattr(prefetch, "offload_group_size", 0))
