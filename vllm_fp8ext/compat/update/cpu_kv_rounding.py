# SPDX-License-Identifier: Apache-2.0
"""Rounds K and V to the nearest E4M3 value before vLLM's CPU kernel caches them.

The kernel cuts bits off: codes are up to a whole step nearer to zero, so that K and V shrink by about 3 %. GPUs round to the
nearest, and so does `kernels.attention.kv_cache`. A value that is a code already loses nothing to either.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.kernels.attention.kv_cache import dequantize, quantize
from vllm_fp8ext.layers.kv_cache_method import FORMATS

FEATURE: str = "core"
WHY: str = "Cache the codes that GPUs and trainers have: vLLM's CPU kernel does not round to the nearest."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's CPU kernel rounds K and V to the nearest code"

INTO_STEP = 1 + 1 / 64
"""Factor that moves a code's value into the step that begins with it: less than half of one, more than BF16 rounds."""


def install() -> None:
    """Round from now on. Idempotent."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    wrap(CPUAttentionBackendImpl, "do_kv_cache_update", _wrap_do_kv_cache_update)


def nearest(values: Tensor, scale: float) -> Tensor:
    """Return values, in the same dtype, whose codes are the nearest, cut off or rounded.

    Args:
        values: K or V, `[tokens, KV heads, head dimension]`, of 16 bits or more.
        scale: what a code is multiplied by.
    """
    scales = torch.tensor([scale], device=values.device)
    return (dequantize(quantize(values, scales), scales) * INTO_STEP).to(values.dtype)


def _wrap_do_kv_cache_update(original: Callable[..., None]) -> Callable[..., None]:
    def do_kv_cache_update(
        self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.kv_cache_dtype in FORMATS:
            key, value = nearest(key, layer._k_scale_float), nearest(value, layer._v_scale_float)
        original(self, layer, key, value, kv_cache, slot_mapping)

    return do_kv_cache_update
