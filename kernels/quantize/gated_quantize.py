# SPDX-License-Identifier: Apache-2.0
"""Multiplies an activated gate by the up projection and quantizes the product, in one launch."""

from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized, empty
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat
from vllm_fp8ext.kernels.numerics.triton_numerics import quantized, rounded
from vllm_fp8ext.kernels.quantize.quantize_activation import GROUPS, large_m, parts, places
from vllm_fp8ext.kernels.runtime.launch import TritonLauncher

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

_TOGETHER = 2
"""Tokens that a program takes where there are many."""


def gated_quantize_reference(
    gate_up_M2K: Tensor, activation: Activation, scale_format: ScaleFormat
) -> tuple[Tensor, Tensor]:
    """Compute what the kernel does: vLLM's `SiluAndMul` and `GeluAndMul` (the function in fp32, rounded to the dtype before
    the product and after it), then `reference.quantize_activation`."""
    gate, up = gate_up_M2K.chunk(2, dim=1)
    if activation == "silu":
        active = torch.nn.functional.silu(gate)
    else:
        active = torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return reference.quantize_activation(active * up, scale_format)


@triton.jit
def active(x, ACTIVATION: tl.constexpr, HARDWARE: tl.constexpr):
    """The activation function of fp32 `x`."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh y) / 2 = 1 / (1 + exp(-2y))
        return _by_sigmoid(x, 1.5957691216057308 * (x + 0.044715 * x * x * x), HARDWARE)
    return _by_sigmoid(x, x, HARDWARE)


_BY_SIGMOID = tl.constexpr(
    "{ .reg .f32 r; mul.f32 r, $2, 0fBFB8AA3B; ex2.approx.ftz.f32 r, r; add.f32 r, r, 0f3F800000;"
    "rcp.approx.ftz.f32 r, r; mul.f32 $0, $1, r; }"
)
"""0fBFB8AA3B is -log2(e)."""


@triton.jit
def _by_sigmoid(x, y, HARDWARE: tl.constexpr):
    """`x / (1 + exp(-y))` in fp32. The quotient is as exact as the exponential: made with a reciprocal, which is one unit in
    the last place away, and zero where the exponential is 2^126 or more. An exact one took longer than all else."""
    if HARDWARE:
        return tl.inline_asm_elementwise(_BY_SIGMOID, "=r,r,r", [x, y], tl.float32, is_pure=True, pack=1)
    return x / (1.0 + tl.exp(-y))


@triton.jit(do_not_specialize=["M", "scales_token", "scales_column"])
def _gated_quantize(
    gate_up_M2K,
    codes_MK,
    scales_MKb,
    rows_S,
    K,
    width,
    row,
    M,
    scales_token,
    scales_column,
    ACTIVATION: tl.constexpr,
    POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, `GROUPS` groups of `TOKENS` tokens: of one that `rows_S` names, or of all."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0).to(tl.int64) * TOKENS
    if CHOSEN:
        first = tl.load(rows_S + first).to(tl.int64)
        if first < 0:
            return
    token, groups, columns = places(first, TOKENS, GROUPS, SIZE)
    inside = (token < M)[:, None] & (columns < K)
    dtype = gate_up_M2K.dtype.element_ty
    at = gate_up_M2K + (token * row)[:, None] + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + K, mask=inside, other=0.0).to(tl.float32)  # on its way while the gate is worked on
    values = rounded(active(gate, ACTIVATION, HARDWARE), dtype, HARDWARE)
    values = rounded(values * up, dtype, HARDWARE)
    codes, scale = quantized(values.to(dtype), POW2, True, HARDWARE)
    room = (token < M)[:, None] & (columns < width)
    tl.store(codes_MK + (token * width)[:, None] + columns, codes, mask=room)
    scaled = (token < M) & (groups < tl.cdiv(K, SIZE))
    tl.store(scales_MKb + token * scales_token + groups * scales_column, scale, mask=scaled)


_launch = TritonLauncher(_gated_quantize, registers=128)


def gated_quantize(
    gate_up_M2K: Tensor,
    activation: Activation,
    scale_format: ScaleFormat,
    rows_S: Tensor | None = None,
    *,
    by_token: bool = False,
    width: int | None = None,
) -> Quantized:
    """Codes and scales of `activation(gate) * up`; `gate_up_M2K` holds gate, then up, BF16 or FP16, columns contiguous.
    `rows_S` (int32): these rows alone, the others stay uninitialized; -1 is none. `by_token`: how scales
    lie (`Quantized`). `width`: as of `quantize_activation`."""
    m, k = gate_up_M2K.shape[0], gate_up_M2K.shape[1] // 2
    room = empty(m, k if width is None else width, gate_up_M2K.device, by_token=by_token)
    codes, scales = room
    early = gate_up_M2K.is_cuda
    count = m if rows_S is None else rows_S.numel()
    if count:
        tokens = _TOGETHER if rows_S is None and count >= large_m(k) else 1
        _launch(
            (-(-count // tokens), parts(k), 1),
            (gate_up_M2K, codes.view(torch.uint8), scales, scales if rows_S is None else rows_S),
            (k, codes.shape[1], gate_up_M2K.stride(0)),
            (m, *scales.stride()),
            (
                *(activation, scale_format == "pow2", early, early, rows_S is not None),
                *(tokens, GROUPS, BLOCK),
            ),
            4,
        )
    return room
