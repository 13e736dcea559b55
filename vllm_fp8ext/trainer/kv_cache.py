# SPDX-License-Identifier: Apache-2.0
"""Attention of Transformers over K and V as the server's FP8 cache holds them.

With `Q` for quantizing and back, a layer attends to `Q(K)` and `Q(V)`, by the scales that the server has. Gradients go
straight through the rounding. Definition: `kernels.attention.kv_cache`.

Shape suffixes: B sequences, G heads of keys and values, T tokens, D head dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.kernels.attention.kv_cache import dequantize, quantize


class Fp8KvAttention:
    """Attention function of Transformers: rounds K and V, and then calls another one.

    It takes what that one takes: the layer, `query`, `key_BGTD` and `value_BGTD` after rotary embedding, a mask, and others
    by name. `use` sets the scales; before that nothing is computed.
    """

    def __init__(self, attention: Callable[..., Any]) -> None:
        """Round for `attention`, such as `ALL_ATTENTION_FUNCTIONS["sdpa"]`."""
        self._attention = attention
        self._scales: list[dict[str, Tensor]] = []

    def use(self, scales: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Take the scales of K and V that are served from now on.

        Args:
            scales: `client.kv_scales().scales`: by layer, in the order of the model, one number or one for each KV head.

        Raises:
            ValueError: no layers, a layer without `k` or `v`, or scales that are not positive numbers.
        """
        problems = [
            f"{layer}: expected positive scales of {kind}, found {list(of.get(kind, []))}"
            for layer, of in scales.items()
            for kind in ("k", "v")
            if not of.get(kind) or not all(0 < scale < float("inf") for scale in of[kind])
        ]
        if problems or not scales:
            raise ValueError("; ".join(problems) or "scales: expected those of each layer, found none")
        self._scales = [{kind: torch.tensor(of[kind]) for kind in ("k", "v")} for of in scales.values()]

    def __call__(
        self, module: Any, query: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, *args: Any, **named: Any
    ) -> Any:
        """Attend. Raises ValueError where the scales are not of this model's layers and heads."""
        if module.layer_idx >= len(self._scales):
            raise ValueError(
                f"layer {module.layer_idx}: expected its scales, found those of {len(self._scales)} layers"
            )
        scales = self._scales[module.layer_idx]
        rounded = (
            _rounded(values, scales[kind], f"layer {module.layer_idx}, {kind}")
            for kind, values in (("k", key_BGTD), ("v", value_BGTD))
        )
        return self._attention(module, query, *rounded, *args, **named)


def _rounded(values_BGTD: Tensor, scales_G: Tensor, name: str) -> Tensor:
    heads = values_BGTD.shape[1]
    if len(scales_G) not in (1, heads):
        raise ValueError(f"{name}: expected 1 scale or {heads}, found {len(scales_G)}")
    out: Tensor = _Rounding.apply(values_BGTD, scales_G.to(values_BGTD.device))
    return out


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values_BGTD: Tensor, scales_G: Tensor) -> Tensor:
        by_token = values_BGTD.transpose(1, 2)
        return dequantize(quantize(by_token, scales_G), scales_G).transpose(1, 2).to(values_BGTD.dtype)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
