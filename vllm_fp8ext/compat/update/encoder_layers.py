# SPDX-License-Identifier: Apache-2.0
"""Knows while a model is built which layers belong to an encoder."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from vllm.model_executor.models.interfaces import SupportsMultiModal

from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.layers.unquantized_layers import building_encoder

FEATURE: str = "core"
WHY: str = "Know which layers are an encoder's: vLLM tells a quantization method a layer's name alone."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.models.interfaces:SupportsMultiModal._mark_tower_model("
    "vllm_config, modalities, targets)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM tells a quantization method what part of a model a layer is of"


def install() -> None:
    """Notice from now on when a model builds an encoder. Idempotent."""
    wrap(SupportsMultiModal, "_mark_tower_model", _wrap_mark_tower_model)


def _wrap_mark_tower_model(original: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
    @contextmanager
    def mark(self: Any, *args: Any, targets: Any = None, **kwargs: Any) -> Iterator[None]:
        with original(self, *args, targets=targets, **kwargs):
            token = building_encoder.set(
                targets is None
            )  # with targets, the language model is built in here, too
            try:
                yield
            finally:
                building_encoder.reset(token)

    return mark
