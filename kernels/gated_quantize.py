# SPDX-License-Identifier: Apache-2.0
"""Activation function, of the gate times the up projection or alone, and activation quantization, in one launch."""

from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels import reference
from vllm_fp8ext.kernels.launch import Launcher
from vllm_fp8ext.kernels.quantized import Quantized, empty
from vllm_fp8ext.kernels.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.triton_numerics import codes_of, magnitude_bits, rounded, scale_of

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
Gelu = Literal["gelu", "gelu_tanh"]
GELUS: tuple[Gelu, ...] = get_args(Gelu)
"""Those that come without a gate too."""

GROUPS = 8
"""Groups of 128 columns that a program takes."""


def gated_quantize_reference(
    gate_up_M2K: Tensor, activation: Activation, scale_format: ScaleFormat
) -> tuple[Tensor, Tensor]:
    """What the kernel computes: vLLM's `SiluAndMul` and `GeluAndMul` (the function in fp32, rounded to the dtype before the
    product and after it), then `reference.quantize_activation`."""
    gate, up = gate_up_M2K.chunk(2, dim=1)
    active = torch.nn.functional.silu(gate) if activation == "silu" else _gelu(gate, activation)
    return reference.quantize_activation(active * up, scale_format)


def gelu_quantize_reference(
    x_MK: Tensor, activation: Gelu, scale_format: ScaleFormat
) -> tuple[Tensor, Tensor]:
    """What the kernel computes without a gate: `torch.nn.GELU`, then `reference.quantize_activation`."""
    return reference.quantize_activation(_gelu(x_MK, activation), scale_format)


def _gelu(x: Tensor, activation: Gelu) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


@triton.jit
def active(x, ACTIVATION: tl.constexpr):
    """The activation function of fp32 `x`."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh y) / 2 = 1 / (1 + exp(-2y))
        return tl.div_rn(x, 1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["scales_token", "scales_column"])
def _gated_quantize(
    gate_up_M2K,
    codes_MK,
    scales_MKb,
    rows_S,
    K,
    row,
    scales_token,
    scales_column,
    ACTIVATION: tl.constexpr,
    POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, `GROUPS` groups of one token: those that `rows_S` names, or all. Not `GATED`: without a product."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    if CHOSEN:
        token = tl.load(rows_S + token).to(tl.int64)
        if token < 0:
            return
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = columns < K
    dtype = gate_up_M2K.dtype.element_ty
    at = gate_up_M2K + token * row + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if GATED:  # on its way while the gate is worked on
        up = tl.load(at + K, mask=inside, other=0.0).to(tl.float32)
    values = rounded(active(gate, ACTIVATION), dtype, HARDWARE)
    if GATED:
        values = rounded(values * up, dtype, HARDWARE)
    scale = scale_of(tl.max(magnitude_bits(values), axis=1), POW2)
    tl.store(codes_MK + token * K + columns, codes_of(values, scale[:, None], True, HARDWARE), mask=inside)
    tl.store(
        scales_MKb + token * scales_token + groups * scales_column, scale, mask=groups < tl.cdiv(K, SIZE)
    )


_launch = Launcher(_gated_quantize)


def gated_quantize(
    gate_up_M2K: Tensor,
    activation: Activation,
    scale_format: ScaleFormat,
    rows_S: Tensor | None = None,
    *,
    by_token: bool = False,
) -> Quantized:
    """Codes and scales of `activation(gate) * up`; `gate_up_M2K` holds gate, then up, BF16 or FP16, columns contiguous.
    `rows_S` (int32): these rows alone, the others stay uninitialized; -1 is none. `by_token`: how scales
    lie (`Quantized`)."""
    m, k = gate_up_M2K.shape[0], gate_up_M2K.shape[1] // 2
    room = empty(m, k, gate_up_M2K.device, by_token=by_token)
    return _quantized(room, gate_up_M2K, activation, scale_format, rows_S, gated=True)


def gelu_quantize(x_MK: Tensor, activation: Gelu, scale_format: ScaleFormat) -> Quantized:
    """Codes and scales of GELU of `x_MK`, BF16 or FP16, columns contiguous."""
    room = empty(x_MK.shape[0], x_MK.shape[1], x_MK.device)
    return _quantized(room, x_MK, activation, scale_format, None, gated=False)


def _quantized(
    room: Quantized,
    x: Tensor,
    activation: Activation,
    scale_format: ScaleFormat,
    rows_S: Tensor | None,
    *,
    gated: bool,
) -> Quantized:
    codes, scales = room
    (m, k), early = codes.shape, x.is_cuda
    count = m if rows_S is None else rows_S.numel()
    if count:
        _launch(
            (count, -(-blocks(k) // GROUPS), 1),
            (x, codes.view(torch.uint8), scales, scales if rows_S is None else rows_S),
            (k, x.stride(0)),
            scales.stride(),
            (activation, scale_format == "pow2", early, early, rows_S is not None, gated, GROUPS, BLOCK),
            4,
        )
    return room
