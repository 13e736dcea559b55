# SPDX-License-Identifier: Apache-2.0
"""Tells which engines run steps that are told by their requests' tokens and contexts alone."""

from typing import Any

FEATURE: str = "core"
WHY: str = "Leave engines with adapters, drafts or several stages to vLLM."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "`decode_step_reuse` and `mixed_full_cudagraph` go"


def is_plain(config: Any) -> bool:
    """Tell whether a `VllmConfig` is of one stage that generates text from tokens alone.

    It has no adapters, drafts and embeddings.
    """
    parallel, model = config.parallel_config, config.model_config
    return bool(
        parallel.pipeline_parallel_size == parallel.data_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
        and config.lora_config is None
        and config.speculative_config is None
        and model.runner_type == "generate"
        and not model.is_multimodal_model
        and not model.enable_prompt_embeds
    )
