# SPDX-License-Identifier: Apache-2.0
"""Applies the served scale to what latent attention caches, in graphs too.

vLLM 0.33 tells the kernel that writes the cache to leave the scale out if it is 1. A graph that was captured then would leave
out every later scale, too.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import MLAAttentionImpl

from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "core"
WHY: str = "Cache K by scales that change with the weights: vLLM leaves a scale of 1 out of its graphs."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.attention.backend:MLAAttentionImpl.do_kv_cache_update("
    "kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's FP8 KV cache takes new scales at run time"


def install() -> None:
    """Apply the scale from now on, whatever it is. Idempotent."""
    wrap(MLAAttentionImpl, "do_kv_cache_update", _wrap_do_kv_cache_update)


def _wrap_do_kv_cache_update(original: Callable[..., None]) -> Callable[..., None]:
    def do_kv_cache_update(
        self: Any,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        del skip_scale
        original(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)

    return do_kv_cache_update
