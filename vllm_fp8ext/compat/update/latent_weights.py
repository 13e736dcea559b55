# SPDX-License-Identifier: Apache-2.0
"""Gives latent attention the exact values of its up-projection, at start and exchanges.

vLLM reads a weight whose quantization it does not know by multiplying it with the identity, which rounds the products once
more, and which an exchange could not repeat in place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import mla_attention

from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.layers.latent_attention import ABSORBED, derive, latent_layers, up_projection
from vllm_fp8ext.layers.linear import BlockFp8LinearMethod
from vllm_fp8ext.update.worker.derived_tensors import ATTRIBUTE, DerivedTensors

FEATURE: str = "core"
WHY: str = (
    "Rebuild W_UK_T and W_UV at an exchange as a start makes them: vLLM multiplies by the identity instead."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.layers.attention.mla_attention:split_kv_b_proj("
    "kv_b_proj, out_dtype, kv_lora_rank, num_heads, qk_nope_head_dim, v_head_dim)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM asks a linear method for its dequantized weight"


def install() -> None:
    """Split up-projections of ours by their codes and scales from now on. Idempotent."""
    wrap(mla_attention, "split_kv_b_proj", _wrap_split_kv_b_proj)


def follow_updates(model: nn.Module) -> None:
    """Have both matrices of each latent attention rebuilt at each exchange."""
    for layer in latent_layers(model):
        setattr(layer, ATTRIBUTE, DerivedTensors(frozenset(ABSORBED), partial(derive, layer)))


def _wrap_split_kv_b_proj(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def split(
        kv_b_proj: Any,
        out_dtype: torch.dtype,
        kv_lora_rank: int,
        num_heads: int,
        qk_nope_head_dim: int,
        v_head_dim: int,
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(kv_b_proj.quant_method, BlockFp8LinearMethod):
            return original(kv_b_proj, out_dtype, kv_lora_rank, num_heads, qk_nope_head_dim, v_head_dim)
        weight_LNR = up_projection(kv_b_proj, out_dtype).T.view(kv_lora_rank, num_heads, -1)
        keys, values = weight_LNR.split([qk_nope_head_dim, v_head_dim], dim=-1)
        return keys, values

    return split
