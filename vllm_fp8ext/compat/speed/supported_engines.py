# SPDX-License-Identifier: Apache-2.0
"""Tells which engines decode by tokens and contexts of a step's requests alone."""

from typing import Any

FEATURE: str = "core"
WHY: str = "Leave engines with adapters, drafts or several stages to vLLM."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "know engines that step together": ("vllm.config.model:ModelConfig.is_moe",),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "`decode_step_reuse` and `mixed_full_cudagraph` go"


def steps_together(config: Any) -> bool:
    """Tell whether cores of a mixture of experts step together. vLLM takes cores of a dense model for engines apart."""
    return bool(config.parallel_config.data_parallel_size != 1 and config.model_config.is_moe)


def is_plain(config: Any) -> bool:
    """Tell whether a `VllmConfig` is of one stage that generates text.

    It has no adapters and no drafts. What prompts have beside tokens does not change how requests decode.
    """
    return reason_not_plain(config) is None


def reason_not_plain(config: Any) -> str | None:
    """Say in a phrase what makes an engine another than `is_plain` finds; None when nothing does."""
    parallel, model = config.parallel_config, config.model_config
    reasons = {
        "speculative decoding": config.speculative_config is not None,
        "LoRA adapters": config.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size != 1,
        "data parallelism of experts": steps_together(config),
        "context parallelism of prompts": parallel.prefill_context_parallel_size != 1,
        f"a {model.runner_type} model": model.runner_type != "generate",
        "embeddings as prompts": model.enable_prompt_embeds,
        "attention both ways within images": _looks_ahead_in_images(model),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _looks_ahead_in_images(model: Any) -> bool:
    """Tell whether attention's metadata names the images of a step."""
    return bool(model.is_mm_prefix_lm and getattr(model, "supports_multimodal_inputs", True))
