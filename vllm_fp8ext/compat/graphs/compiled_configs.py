# SPDX-License-Identifier: Apache-2.0
"""Finds every `VllmConfig` that a model is compiled with."""

from typing import Any

from torch import nn

FEATURE: str = "core"
WHY: str = "Add to what graphs are cached by: parts of a model have copies of its configuration."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "`fusion` and `fusion_attention` go"


def compiled_with(config: Any, model: nn.Module) -> list[Any]:
    """Every `VllmConfig` that the model is compiled with: parts of it may have copies of its own."""
    return [config, *(part.vllm_config for part in model.modules() if hasattr(part, "vllm_config"))]
