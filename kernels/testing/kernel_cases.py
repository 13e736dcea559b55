# SPDX-License-Identifier: Apache-2.0
"""Shapes and inputs of kernels for tests and benchmarks, and how exact results must be."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_fp8ext.kernels.gemm.decode_gemm_configs import TileConfig
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK

if TYPE_CHECKING:
    from vllm_fp8ext.kernels.attention.norm_rope import NormWeights

LINEAR = {"gate_up": (24576, 4096), "down": (4096, 12288), "qkv": (6144, 4096), "o": (4096, 4096)}
"""Projections of Qwen3-8B, `(N, K)`."""
LAYERS = 36
EXPERTS = (128, 768, 2048)
"""Experts of a layer of Qwen3-30B-A3B: their number, their width and the hidden size."""
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
KV_BLOCK = 16
"""Tokens of a block of the KV cache."""
DECODE_TOKENS = (1, 8, 16, 32, 64)
PREFILL_TOKENS = (4096, 8192)
EXPERT_TOKENS = tuple(1 << power for power in range(14))

TILE_CONFIGS = (
    TileConfig(rows=128, splits=1),
    TileConfig(rows=64, splits=1, early=True),
    TileConfig(rows=64, splits=2, stages=3),
    TileConfig(rows=64, splits=1, stages=5),
    TileConfig(rows=192, splits=2, early=True),
    TileConfig(rows=128, splits=4, early=True),
    TileConfig(rows=192, splits=4),
    TileConfig(rows=256, splits=8),
    TileConfig(rows=64, splits=8, early=True),
    TileConfig(rows=128, splits=16),
)
"""Tile configs of every kind that `decode_gemm` takes."""
DECODE_SHAPES = (
    (8, 128, 128, False),
    (1, 4096, 4096, False),
    (8, 4096, 4096, True),
    (16, 6144, 4096, False),
    (33, 200, 1040, True),
    (64, 4100, 2048, False),
    (5, 20001, 1024, True),
    (24, 300, 6400, False),
    (100, 512, 4096, False),
    (100, 1100, 2176, True),
    (3, 128, 5120, False),
)
"""Tokens, rows, columns, and whether there is a bias: for `decode_gemm`."""

TENSOR_CORE = BLOCK * 2.0**-13
"""Error of Hopper's FP8 tensor cores over one block, relative to its largest product: each of 128 products is cut about 13
bits below the largest one before they are added; blocks are then added in fp32 (DeepSeek-V3, arXiv 2412.19437, section
3.3.2)."""
BF16 = 2.0**-8
"""Relative rounding of a BF16 result."""


def weight(n: int, k: int, device: str, seed: int = 0) -> Tensor:
    """A BF16 weight with outlier columns."""
    noise = torch.Generator(device).manual_seed(seed)
    values = torch.randn(n, k, generator=noise, device=device) * 0.02
    values[:, ::97] *= 10
    return values.bfloat16()


def activations(m: int, k: int, device: str, seed: int = 0) -> Tensor:
    """BF16 activations with outlier channels."""
    noise = torch.Generator(device).manual_seed(seed + 1)
    values = torch.randn(m, k, generator=noise, device=device)
    values[:, ::61] *= 30
    return values.bfloat16()


def same(first: Tensor, second: Tensor) -> bool:
    """Equal bit for bit, and of one dtype and shape."""
    bits = [
        part.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8) for part in (first, second)
    ]
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(*bits)


def rotary(m: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor, "NormWeights", Tensor]:
    """Positions, table, norms and scale of the queries of a layer of Qwen3-8B."""
    from vllm_fp8ext.kernels.attention.norm_rope import NormWeights

    noise = torch.Generator(device).manual_seed(seed)
    positions = torch.randint(4096, (m,), generator=noise, device=device)
    angles = torch.outer(
        torch.arange(4096.0, device=device), 1e6 ** -(torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    )
    table = torch.cat((angles.cos(), angles.sin()), -1).bfloat16()
    weights = torch.rand(2, HEAD_DIM, generator=noise, device=device).bfloat16() + 0.5
    return positions, table, NormWeights(weights[0], weights[1], 1e-6), torch.full((), 0.02, device=device)


def kv_memory(layers: int, blocks: int, device: str) -> Tensor:
    """A KV cache of any codes but NaN: bytes `[layers, blocks, KV_HEADS, KV_BLOCK, 2 * HEAD_DIM]`, as vLLM's attention
    backends for GPUs have it."""
    memory = torch.empty(layers, blocks, KV_HEADS, KV_BLOCK, 2 * HEAD_DIM, dtype=torch.uint8, device=device)
    noise = torch.Generator(device).manual_seed(0)
    for layer in memory:
        layer.random_(0, 0xFF, generator=noise)
        layer[layer == 0x7F] = 0
    return memory


def kv_views(memory: Tensor) -> list[tuple[Tensor, Tensor]]:
    """K and V of each layer of `kv_memory`, `[blocks, KV_BLOCK, KV_HEADS, HEAD_DIM]`."""
    split = memory.transpose(2, 3).split(HEAD_DIM, -1)
    return list(zip(*split, strict=True))


def kv_step(tokens: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Make K, V and quantized Q of one layer and step.

    K and V: BF16 `[tokens, KV_HEADS, HEAD_DIM]`, side by side in memory. Q: `[tokens, KV_HEADS, Q_HEADS / KV_HEADS *
    HEAD_DIM]`.
    """
    fused = activations(tokens, 2 * KV_HEADS * HEAD_DIM, device, seed)
    k, v = (part.view(tokens, KV_HEADS, HEAD_DIM) for part in fused.chunk(2, 1))
    q = 40 * activations(tokens, Q_HEADS * HEAD_DIM, device, seed + 1)
    return k, v, q.clamp(-448, 448).to(reference.FP8_DTYPE).view(tokens, KV_HEADS, -1)


def gemm_error(
    out_MN: Tensor,
    x_codes_MK: Tensor,
    x_scales_MKb: Tensor,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None = None,
) -> float:
    """Largest error of a BF16 GEMM of these operands, as a part of its bound: right if below 1. NaN is infinite."""
    x_values = reference.dequantize_activation(x_codes_MK, x_scales_MKb).double()
    x_largest = _block_maxima(x_values)
    worst = 0.0
    for rows in _row_slices(codes_NK.shape[0]):
        blocks = slice(rows.start // BLOCK, reference.blocks(rows.stop))
        values = reference.dequantize_weight(codes_NK[rows], scales_NbKb[blocks]).double()
        exact = x_values @ values.T
        if bias_N is not None:
            exact += bias_N[rows].double()
        bound = TENSOR_CORE * (x_largest @ _block_maxima(values).T) + BF16 * exact.abs() + 1e-30
        ratio = ((out_MN[:, rows].double() - exact).abs() / bound).nan_to_num(nan=float("inf")).max()
        worst = max(worst, float(ratio))
    return worst


def _row_slices(n: int) -> Iterator[slice]:
    step = 32 * BLOCK
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _block_maxima(values: Tensor) -> Tensor:
    """Largest magnitude of each row in every 128 columns."""
    return torch.stack([part.abs().amax(1) for part in values.split(BLOCK, 1)], 1)


def routing(m: int, count: int, chosen: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights that add up to one, and different experts drawn evenly, of each token."""
    noise = torch.Generator(device).manual_seed(seed)
    scores = torch.randn(m, count, generator=noise, device=device)
    best, of = scores.topk(chosen, dim=1)
    return best.softmax(1), of.int()
