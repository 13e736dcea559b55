# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU kernel caches K and V: as nearest codes once ours are around it, and cut off without."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_fp8ext.compat.update import cpu_kv_rounding
from vllm_fp8ext.kernels.attention.kv_cache import quantize
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE

TOKENS, HEADS, WIDTH, BLOCK = 32, 2, 64, 32


def values(dtype: torch.dtype) -> Tensor:
    """K or V of one block, `[tokens, heads, width]`: all magnitudes from subnormal codes to beyond the largest."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(TOKENS, HEADS, WIDTH, generator=generator)
    return (random * 2.0 ** torch.linspace(-14, 6, WIDTH)).to(dtype)


def cached(update: Any, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Codes of K and V that `update` writes, each sorted: where a kernel has them in its block is its own matter."""
    cache = torch.zeros(1, HEADS, BLOCK, 2 * WIDTH, dtype=torch.uint8)
    layer = SimpleNamespace(isa="vec", _k_scale_float=scale, _v_scale_float=scale)
    impl = SimpleNamespace(attn_type="decoder", kv_cache_dtype="fp8")
    update(impl, layer, key, value, cache, torch.arange(TOKENS))
    halves = cache.view(1, HEADS, 2 * BLOCK, WIDTH).chunk(2, dim=2)
    return tuple(_sorted(half.contiguous().view(FP8_DTYPE)) for half in halves)  # type: ignore[return-value]


def _sorted(codes: Tensor) -> Tensor:
    return codes.float().flatten().sort().values


@pytest.mark.parametrize("scale", [2.0**-5, 0.04], ids=["pow2", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_codes_are_the_nearest(scale: float, dtype: torch.dtype) -> None:
    cpu_kv_rounding.install()
    key, value = values(dtype), values(dtype).neg() / 3
    written = cached(CPUAttentionBackendImpl.do_kv_cache_update, key, value, scale)
    for codes, source in zip(written, (key, value), strict=True):
        assert torch.equal(codes, _sorted(quantize(source, torch.tensor([scale]))))


def test_vllms_kernel_still_cuts_codes_off() -> None:
    """The file can go once this fails."""
    key = torch.full((TOKENS, HEADS, WIDTH), 1.0625 + 0.03125, dtype=torch.bfloat16)
    cache = torch.zeros(1, HEADS, 2 * BLOCK, WIDTH, dtype=torch.uint8)
    halves = cache.chunk(2, dim=2)
    slots = torch.arange(TOKENS)
    ops.cpu_attn_reshape_and_cache(
        key, key, *halves, slots, "vec", k_scale=1.0, v_scale=1.0, kv_cache_dtype="fp8"
    )
    assert cache.view(FP8_DTYPE).float().unique().tolist() == [1.0]
