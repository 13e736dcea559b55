# SPDX-License-Identifier: Apache-2.0
"""Decides what becomes of a model some of whose layers the shadow can't compute: no prompt can be tried on new weights."""

import logging

from torch import nn

from vllm_fp8ext.compat.unsupported_options import not_updatable
from vllm_fp8ext.compat.update.shadow_attention import layers_without_forward
from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError

FEATURE: str = "core"
WHY: str = "Update models with layers that run inside vLLM's engine alone."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM can run a second model beside the served one"

logger = logging.getLogger("vllm.fp8ext")


SHARED_EXPERTS = "experts that data-parallel ranks share out"
"""Kind of layers that ranks compute together in steps alone: no shadow can have them meet between two steps."""
STAGES = "layers on other pipeline stages"
"""Kind of layers whose inputs and outputs pass between ranks in steps alone."""


def untried_layers(
    shadow: nn.Module, settings: Settings, *, shares_experts: bool = False, stages: int = 1
) -> tuple[str, ...]:
    """Name kinds of layers that the shadow can't compute; with some, an update's tensors must be finite, and that is all.

    `shares_experts`: data-parallel ranks share out experts. `stages`: pipeline-parallel size.

    Raises:
        ConfigError: there are some, and settings refuse them, or ask for what only prompts can tell.
    """
    beside = {SHARED_EXPERTS: shares_experts, STAGES: stages > 1}
    kinds = (*layers_without_forward(shadow), *(kind for kind, there in beside.items() if there))
    if not kinds:
        return ()
    if settings.untried_layers == "refuse":
        raise not_updatable(kinds, "could not be tried before it is served (untried_layers refuse)")
    asked = ["canary"] if settings.canary is not None else []
    if settings.kv_scales is not None and settings.kv_scales.policy != "static":
        asked.append(f"kv_scales {settings.kv_scales.policy}")
    if asked:
        raise ConfigError(
            f"{' and '.join(asked)}: no prompt runs through new weights of models with {', '.join(kinds)}; expected no "
            "canary, and kv_scales static or none"
        )
    logger.warning(
        "blockfp8: no canary: this model has layers that can't be computed beside the engine (%s). Every tensor of an update "
        "must be finite, and that is all that is tried. The setting untried_layers refuse refuses such models",
        ", ".join(kinds),
    )
    return kinds
