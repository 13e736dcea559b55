# SPDX-License-Identifier: Apache-2.0
"""`norm_rope` as an opaque operator of compiled graphs."""

from collections.abc import Sequence

from torch import Tensor

from vllm_fp8ext.kernels.attention.position_sections import PositionSections
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE
from vllm_fp8ext.kernels.runtime.operators import operator


def _like_norm_rope(
    qkv_MN: Tensor,
    _positions: Tensor,
    cos_sin_PD: Tensor,
    _q_norm_D: Tensor | None,
    _k_norm_D: Tensor | None,
    _epsilon: float,
    q_scale: Tensor | None,
    heads: int,
    kv_heads: int,
    _sections: Sequence[int] | None = None,
    _interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    m, size = qkv_MN.shape[0], cos_sin_PD.shape[1]
    query = qkv_MN.new_empty(m, heads, size, dtype=qkv_MN.dtype if q_scale is None else FP8_DTYPE)
    return query, qkv_MN.new_empty(m, kv_heads, size)


@operator(_like_norm_rope)
def norm_rope(
    qkv_MN: Tensor,
    positions: Tensor,
    cos_sin_PD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    epsilon: float,
    q_scale: Tensor | None,
    heads: int,
    kv_heads: int,
    sections: Sequence[int] | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Queries and keys as `kernels.attention.norm_rope.norm_rope` makes them: normed with both weights or with none.

    Positions are `[M]`, or `[3, M]` with the three `sections` of `PositionSections`.
    """
    from vllm_fp8ext.kernels.attention import norm_rope as kernel

    norms = None if q_norm_D is None or k_norm_D is None else kernel.NormWeights(q_norm_D, k_norm_D, epsilon)
    rows = None
    if sections is not None:
        time, height, width = sections
        rows = PositionSections(time, height, width, interleaved)
    qkv_MN = qkv_MN if qkv_MN.stride(1) == 1 else qkv_MN.contiguous()
    return kernel.norm_rope(qkv_MN, positions, cos_sin_PD, norms, q_scale, heads, kv_heads, rows)
