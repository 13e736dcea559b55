# SPDX-License-Identifier: Apache-2.0
"""Inputs on which kernels go wrong most easily: for tests alone, so that the wheel leaves them out."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK
from vllm_fp8ext.kernels.testing.kernel_cases import activations, routing, weight


def integers(*shape: int, exponent: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Draw small integers times a power of two, on the CPU.

    Zeros of both signs are among them. Squares of 2,500 that are twice as large stay below 2^24 in sum, which is exact in any
    order.
    """
    noise = torch.Generator().manual_seed(seed)
    values = torch.randint(-32, 33, shape, generator=noise).float() * 2.0**exponent
    values[..., ::5] *= -0.0
    return values.to(dtype)


KINDS = ("normal", "heavy", "zeros", "floor", "subnormal", "large", "edge")
"""Distributions of `awkward`."""


def awkward(rows: int, columns: int, kind: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draw finite values that quantizers get wrong most easily, on the CPU.

    Zeros of both signs are among them.

    `heavy`: tails over many powers of two; `zeros`: whole blocks of them; `floor`: magnitudes around
    `reference.AMAX_FLOOR`; `large`: near the end of the range, but where a code rounded up can still be scaled back;
    `edge`: up to 448 times a power of two, or to a neighbour, where the scale of format `pow2` changes and quotients lie
    in the middle of two codes.
    """
    noise = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=noise)
    if kind == "heavy":
        values *= torch.exp(4 * torch.randn(rows, columns, generator=noise))
    elif kind == "zeros":
        values[: 2 * BLOCK, :BLOCK] *= 0.0
    elif kind == "floor":
        values *= 5e-11
    elif kind == "subnormal":
        values *= 2.0**-130
    elif kind == "large":
        values = values.clamp(-1, 1) * 3e38
    elif kind == "edge":
        edge, exponent = (
            int(torch.randint(low, high, (), generator=noise)) for low, high in ((0, 3), (-9, 7))
        )
        limit = (446.0, 448.0, 450.0)[edge]
        values = (values * 400).clamp(-limit, limit) * 2.0**exponent
    elif kind != "normal":
        raise ValueError(f"kind: expected one of {KINDS}, found {kind!r}")
    values[::7, ::5] = -0.0
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


GEMM_KINDS = ("outliers", "heavy", "zeros")
"""Distributions of `gemm_inputs`."""


def gemm_inputs(m: int, n: int, k: int, kind: str, device: str) -> tuple[Tensor, Tensor]:
    """BF16 activations `[m, k]` and weight `[n, k]`: with outlier channels, or both `awkward`."""
    if kind == "outliers":
        return activations(m, k, device), weight(n, k, device)
    x, values = (awkward(rows, k, kind, torch.bfloat16, rows) for rows in (m, n))
    return x.to(device), values.to(device)


class ExpertCase(NamedTuple):
    """A layer of experts, its tokens, and where they go."""

    x_MK: Tensor
    gate_up: Tensor
    gate_up_scales: Tensor
    down: Tensor
    down_scales: Tensor
    weights_MT: Tensor
    experts_MT: Tensor
    scale_format: reference.ScaleFormat

    @property
    def operands(self) -> tuple[Any, ...]:
        """As the reference of experts takes them."""
        return (*self[:7], "silu", self.scale_format)


def experts(
    m: int,
    hidden: int,
    width: int,
    count: int,
    chosen: int,
    device: str,
    seed: int = 0,
    *,
    scale_format: reference.ScaleFormat = "fp32",
) -> ExpertCase:
    """Make `count` experts of `width`, and tokens of which each goes to `chosen` different ones.

    `width`: a multiple of 128.
    """
    codes = [
        torch.empty(count, rows, columns, dtype=reference.FP8_DTYPE, device=device)
        for rows, columns in ((2 * width, hidden), (hidden, width))
    ]
    scales = [
        torch.empty(count, *(reference.blocks(s) for s in part.shape[1:]), device=device) for part in codes
    ]
    for index, (part, scale) in enumerate(zip(codes, scales, strict=True)):
        for expert in range(count):
            values = weight(part.shape[1], part.shape[2], device, seed + 2 * expert + index)
            part[expert], scale[expert] = reference.quantize_weight(values, scale_format)
    return ExpertCase(
        activations(m, hidden, device, seed),
        codes[0],
        scales[0],
        codes[1],
        scales[1],
        *routing(m, count, chosen, device, seed),
        scale_format,
    )
