# SPDX-License-Identifier: Apache-2.0
"""Activation function of the gate times the up projection, and activation quantization, in one launch."""

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

GROUPS = 8
"""Groups of 128 columns that a program takes."""


def gated_quantize_reference(
    gate_up_M2K: Tensor, activation: Activation, scale_format: ScaleFormat
) -> tuple[Tensor, Tensor]:
    """What the kernel computes: vLLM's `SiluAndMul` and `GeluAndMul` (the function in fp32, rounded to the dtype before the
    product and after it), then `reference.quantize_activation`."""
    gate, up = gate_up_M2K.chunk(2, dim=1)
    if activation == "silu":
        active = torch.nn.functional.silu(gate)
    else:
        active = torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return reference.quantize_activation(active * up, scale_format)


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
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, `GROUPS` groups of one token: of the rows that `rows_S` names, or of all."""
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
    up = tl.load(at + K, mask=inside, other=0.0).to(tl.float32)
    values = rounded(rounded(active(gate, ACTIVATION), dtype, HARDWARE) * up, dtype, HARDWARE)
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
    codes, scales = empty(m, k, gate_up_M2K.device, by_token=by_token)
    early = gate_up_M2K.is_cuda
    count = m if rows_S is None else rows_S.numel()
    if count:
        _launch(
            (count, -(-blocks(k) // GROUPS), 1),
            (gate_up_M2K, codes.view(torch.uint8), scales, scales if rows_S is None else rows_S),
            (k, gate_up_M2K.stride(0)),
            scales.stride(),
            (activation, scale_format == "pow2", early, early, rows_S is not None, GROUPS, BLOCK),
            4,
        )
    return Quantized(codes, scales)
