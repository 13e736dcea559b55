# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA): the two matrices that vLLM makes of `kv_b_proj` after loading.

Requests decode with `W_UK_T` `[heads, P, L]` and `W_UV` `[heads, L, V]`, in the dtype of the model: the rows of `kv_b_proj`
that make keys and values of the latent, per head P and V of them. Prompts run through `kv_b_proj` itself. An exchange
rebuilds both matrices in place.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import MLAAttention

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.layers.linear import BlockFp8LinearMethod

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "rebuild what latent attention makes of its weights": (
        "vllm.model_executor.layers.attention:MLAAttention("
        "num_heads, qk_nope_head_dim, v_head_dim, kv_lora_rank, kv_b_proj)",
    ),
}

ABSORBED = ("W_UK_T", "W_UV")
"""Names of the two matrices in a layer of vLLM's."""


def latent_layers(model: nn.Module) -> list[Any]:
    """Return the model's layers of latent attention, in its order."""
    return [module for module in model.modules() if isinstance(module, MLAAttention)]


def up_projection(projection: Any, dtype: torch.dtype) -> Tensor:
    """Return the values of a `kv_b_proj` as it is served, `[rows, L]`: of codes, what they stand for, rounded to `dtype`."""
    if isinstance(projection.quant_method, BlockFp8LinearMethod):
        (matrix,) = projection.quant_method.matrices(projection)
        return reference.dequantize_weight(matrix.values, matrix.scales).to(dtype)
    return projection.weight.data.to(dtype)


def split_heads(weight_RL: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """Return views of an up-projection as `W_UK_T` and `W_UV` lie: `[heads, P, L]` and `[heads, L, V]`."""
    by_head = weight_RL.view(layer.num_heads, layer.qk_nope_head_dim + layer.v_head_dim, layer.kv_lora_rank)
    keys, values = by_head.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
    return keys, values.transpose(1, 2)


def derive(layer: Any) -> None:
    """Rebuild both matrices of a layer from its `kv_b_proj`, in place, so that addresses stay. Needed after every exchange.

    On a GPU this is queued on the current stream, as the exchange is.
    """
    weight = up_projection(layer.kv_b_proj, getattr(layer, ABSORBED[0]).dtype)
    for name, values in zip(ABSORBED, split_heads(weight, layer), strict=True):
        getattr(layer, name).data.copy_(values)
