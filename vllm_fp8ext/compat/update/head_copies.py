# SPDX-License-Identifier: Apache-2.0
"""Has copies of the embedding that serve as the output layer in FP8 follow updates."""

from functools import partial

from torch import nn

from vllm_fp8ext.layers.lm_head import HEAD_COPY_TENSORS, head_copies
from vllm_fp8ext.update.worker.derived_tensors import ATTRIBUTE, DerivedTensors

FEATURE: str = "core"
WHY: str = "Rebuild the FP8 copy of the embedding at an exchange: vLLM knows of no such copies."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "never: the copy is this plugin's"


def follow_updates(model: nn.Module) -> None:
    """Rebuild the FP8 copies of embeddings at each exchange, and before a canary."""
    for layer, method in head_copies(model):
        setattr(layer, ATTRIBUTE, DerivedTensors(HEAD_COPY_TENSORS, partial(method.derive, layer)))
