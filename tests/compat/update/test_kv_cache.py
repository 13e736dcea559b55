# SPDX-License-Identifier: Apache-2.0
"""Where K and V lie in blocks, in the layouts of GPUs. `test_kv_engines.py` has those of real engines on this CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layout_strides
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_fp8ext.compat.update.kv_cache import HeldBlocks, key_value_views, latent_views
from vllm_fp8ext.compat.update.kv_rescale import CachedCodes
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.attention.rescale_kv import rescaled
from vllm_fp8ext.layers.kv_cache_method import LATENT_BACKENDS


def layer_of(backend: str, cache: torch.Tensor, heads: int, width: int) -> Any:
    """What is read of a layer; the backends of GPUs make none on a CPU."""
    return SimpleNamespace(
        layer_name="layer",
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        kv_cache_dtype="fp8",
        head_size=width,
        head_size_v=width,
        num_kv_heads=heads,
        kv_cache=cache,
    )


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_every_layout_of_vllm_is_split_into_heads(backend: str, layout: KVCacheLayout) -> None:
    blocks, layers, heads, size, width = 3, 2, 4, 16, 32
    spec = FullAttentionSpec(block_size=size, num_kv_heads=heads, head_size=width, dtype=torch.uint8)
    strides = compute_layout_strides(spec, blocks, layers, layout)
    raw = torch.arange(layers * blocks * heads * size * 2 * width).to(torch.uint8)
    logical = raw.as_strided((layers, blocks, heads, size, 2 * width), strides)
    key, value = key_value_views(layer_of(backend, logical[1], heads, width))
    assert key.shape == value.shape == (blocks, size, heads, width)
    for block, token, head in ((0, 0, 0), (2, 15, 3), (1, 7, 2)):
        place = logical[1, block, head, token]
        assert torch.equal(key[block, token, head], place[:width])
        assert torch.equal(value[block, token, head], place[width:])
    assert key.data_ptr() == logical[1].data_ptr()


def test_other_backends_are_refused() -> None:
    assert FlashAttentionBackend.get_name() == "FLASH_ATTN"
    layer = layer_of("FLASHINFER", torch.zeros(1, 1, 16, 64, dtype=torch.uint8), 1, 32)
    with pytest.raises(ConfigError, match=r"FLASH_ATTN, TRITON_ATTN, CPU_ATTN, .*, found FLASHINFER"):
        key_value_views(layer)


@pytest.mark.parametrize("backend", LATENT_BACKENDS)
def test_rows_of_latent_attention_are_rescaled_whole(backend: str) -> None:
    """By the ratio of K alone: a row is key and value."""
    cache = torch.arange(4 * 16 * 576).remainder(126).to(torch.uint8).view(4, 16, 576)
    layer = layer_of(backend, cache.clone(), 1, 576)
    held = {"layers": ("layer",), "block_size": 32, "blocks": (1,)}
    found = CachedCodes({"layer": layer}).rescale({"layer": {"k": [0.5], "v": [1.0]}}, [held])
    expected, _ = rescaled(cache[2:], torch.tensor(0.5))
    assert torch.equal(layer.kv_cache[2:], expected)
    assert torch.equal(layer.kv_cache[:2], cache[:2])
    assert found["codes"] == 2 * 16 * 576


def test_a_latent_cache_of_another_shape_is_refused() -> None:
    layer = layer_of("FLASHMLA", torch.zeros(1, 16, 656, dtype=torch.uint8), 1, 576)
    with pytest.raises(ConfigError, match=r"expected a cache of bytes \[blocks, block_size, 576\]"):
        latent_views(layer)


def test_kernel_blocks_are_parts_of_a_block() -> None:
    held = HeldBlocks(("layer",), 64, (1, 5))
    assert held.rows(torch.empty(20, 64, 1, 8)) == (1, 5)
    assert held.rows(torch.empty(40, 32, 1, 8)) == [2, 3, 10, 11]
    with pytest.raises(ValueError, match="64 tokens are no multiple of 48"):
        held.rows(torch.empty(20, 48, 1, 8))
