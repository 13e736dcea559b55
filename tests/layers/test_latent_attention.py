# SPDX-License-Identifier: Apache-2.0
"""What latent attention makes of its up-projection: how it lies, and what decoding with it computes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import MLAAttentionImpl

from vllm_fp8ext.compat.update import latent_cache, latent_weights
from vllm_fp8ext.compat.update.shadow_attention import _cached, _expanded, causal_attention
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.layers.latent_attention import derive, split_heads, up_projection
from vllm_fp8ext.layers.linear import BlockFp8LinearMethod, KeptLinearMethod

HEADS, P, V, LATENT, ROPE = 3, 24, 40, 128, 8


class Projection(nn.Module):
    """A `kv_b_proj` of random weights, quantized or in 16 bits."""

    def __init__(self, seed: int, *, quantized: bool) -> None:
        super().__init__()
        values = torch.randn(HEADS * (P + V), LATENT, generator=torch.Generator().manual_seed(seed))
        self.quant_method: Any = KeptLinearMethod()
        if quantized:
            self.quant_method = object.__new__(
                BlockFp8LinearMethod
            )  # to make one takes a configuration of vLLM's
            codes, scales = reference.quantize_weight(values)
            self.weight, self.weight_scale_inv = (
                nn.Parameter(part, requires_grad=False) for part in (codes, scales)
            )
        else:
            self.weight = nn.Parameter(values.bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ up_projection(self, x.dtype).T, None


def layer_of(projection: Projection) -> Any:
    """A layer of vLLM's as far as `derive` and the shadow's attention look at it."""
    return SimpleNamespace(
        num_heads=HEADS,
        qk_nope_head_dim=P,
        qk_rope_head_dim=ROPE,
        v_head_dim=V,
        kv_lora_rank=LATENT,
        kv_b_proj=projection,
        W_UK_T=None,
        W_UV=None,
    )


def made_by_vllm(layer: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """`W_UK_T` and `W_UV` as `MLAAttention.process_weights_after_loading` makes them."""
    latent_weights.install()
    sizes = layer.kv_lora_rank, layer.num_heads, layer.qk_nope_head_dim, layer.v_head_dim
    keys, values = mla_attention.split_kv_b_proj(layer.kv_b_proj, dtype, *sizes)
    return keys.permute(1, 2, 0), values.transpose(0, 1)


@pytest.mark.parametrize("quantized", [True, False])
def test_an_exchange_makes_in_place_what_a_start_makes(quantized: bool) -> None:
    layer = layer_of(Projection(0, quantized=quantized))
    layer.W_UK_T, layer.W_UV = (nn.Parameter(part, requires_grad=False) for part in made_by_vllm(layer))
    before = [(part, part.data_ptr(), part.clone()) for part in (layer.W_UK_T, layer.W_UV)]
    other = layer_of(Projection(1, quantized=quantized))
    for (_, served), (_, sent) in zip(
        layer.kv_b_proj.named_parameters(), other.kv_b_proj.named_parameters(), strict=True
    ):
        served.data.copy_(sent)
    derive(layer)
    for (part, address, old), expected in zip(before, made_by_vllm(other), strict=True):
        assert torch.equal(part, expected)
        assert part.data_ptr() == address
        assert not torch.equal(part, old)


def test_codes_are_taken_for_what_they_stand_for() -> None:
    """vLLM's own product with the identity would be rounded once more."""
    layer = layer_of(Projection(0, quantized=True))
    weight = reference.dequantize_weight(layer.kv_b_proj.weight, layer.kv_b_proj.weight_scale_inv)
    keys, values = made_by_vllm(layer)
    by_head = weight.bfloat16().view(HEADS, P + V, LATENT)
    assert torch.equal(keys, by_head[:, :P])
    assert torch.equal(values, by_head[:, P:].transpose(1, 2))


def test_what_is_calibrated_is_what_decoding_multiplies() -> None:
    """Attention of the absorbed query over cached rows is attention of the query over keys and values."""
    layer, generator = layer_of(Projection(0, quantized=True)), torch.Generator().manual_seed(2)
    query, latent, rope = (
        torch.randn(*shape, generator=generator)
        for shape in ((9, HEADS, P + ROPE), (9, LATENT), (9, 1, ROPE))
    )
    keys, values = _expanded(layer, latent, rope)
    expected = causal_attention(query, keys, values, scale=0.02)
    absorbed, row, value = _cached(layer, query, latent, rope)
    assert (absorbed.shape, row.shape) == ((9, HEADS, LATENT + ROPE), (9, 1, LATENT + ROPE))
    assert value is row
    out = causal_attention(absorbed, row, value[..., :LATENT], scale=0.02)
    _, up = split_heads(up_projection(layer.kv_b_proj, torch.float32), layer)
    found = torch.bmm(out.transpose(0, 1), up).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_scale_of_one_is_not_left_out_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 passes `skip_scale`, earlier ones do not know it; a graph would keep it when the scale is another."""
    told: list[Any] = []

    def do_kv_cache_update(self: Any, *arguments: Any, skip_scale: bool = False) -> None:
        told.append((arguments, skip_scale))

    monkeypatch.setattr(MLAAttentionImpl, "do_kv_cache_update", do_kv_cache_update)
    latent_cache.install()
    arguments = *(torch.zeros(1) for _ in range(4)), "fp8", torch.ones(())
    cache: Any = MLAAttentionImpl.do_kv_cache_update
    cache(None, *arguments)
    cache(None, *arguments, True)
    assert told == [(arguments, False), (arguments, False)]
