# SPDX-License-Identifier: Apache-2.0
"""`reference_experts` on a Hopper GPU for few tokens, where the time goes into reading the weights of many experts: two
grouped GEMMs, of which the first also applies the gate, and a sum.

Weights are the left operand: tensor cores want 64 rows there, and take few columns. Each expert's tokens come in blocks
(`expert_rows`); activations are quantized where they are read. Every sum has a fixed order.

Shape suffixes: as in `experts.py` and `expert_rows.py`; Kb and Pb count blocks of 128.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.expert_cuts import Cut
from vllm_fp8ext.kernels.expert_rows import expert_rows
from vllm_fp8ext.kernels.expert_sum import expert_sum
from vllm_fp8ext.kernels.gated_quantize import active
from vllm_fp8ext.kernels.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.quantized import empty
from vllm_fp8ext.kernels.reference import BLOCK, ScaleFormat
from vllm_fp8ext.kernels.triton_numerics import codes_of, magnitude_bits, rounded, scale_of


@triton.jit
def _activations(x_at, scales_at, valid, QUANTIZED, POW2, EVEN, HARDWARE):
    """Codes and scales of a block of activations: as they lie there, or quantized here."""
    if QUANTIZED:
        codes = tl.load(x_at) if EVEN else tl.load(x_at, mask=valid, other=0.0)
        return codes.to(tl.float8e4nv, bitcast=True), tl.load(scales_at)
    x = (tl.load(x_at) if EVEN else tl.load(x_at, mask=valid, other=0.0)).to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(x), axis=1), POW2)
    return codes_of(x, scale[:, None], True, HARDWARE).to(tl.float8e4nv, bitcast=True), scale


@triton.jit
def _slots(slots_R, block, S, ALONE: tl.constexpr, TOKENS: tl.constexpr):
    """The slots of a block, S or more where there is none; and whose activations are read, which is then the first's."""
    lanes = tl.arange(0, TOKENS)
    if ALONE:
        return tl.where(lanes == 0, block, S), tl.zeros((TOKENS,), tl.int32) + block
    slots = tl.load(slots_R + block * TOKENS + lanes)
    return slots, tl.where(slots < S, slots, tl.load(slots_R + block * TOKENS))


@triton.jit(do_not_specialize=["S", "x_scales_column", "out_scales_column"])
def _gate_up(
    x_MK,
    x_scales_MKb,
    gate_up_E2PK,
    scales,
    slots_R,
    owners_B,
    out_SP,
    out_scales_SPb,
    S,
    K,
    P,
    x_row,
    x_scales_column,
    out_scales_column,
    CHOSEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ALONE: tl.constexpr,
    POW2: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: `ROWS` rows of gate and of up of one expert, one block of its tokens. Writes `activation(gate) * up`,
    quantized where it has a whole block of columns."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, tile = tl.program_id(0), tl.program_id(1)
    owner = tl.load(owners_B + block).to(tl.int64)
    if owner < 0:
        return
    slots, sources = _slots(slots_R, block, S, ALONE, TOKENS)
    tokens = (sources // CHOSEN).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE)
    column_blocks = tl.cdiv(K, SIZE)
    gate_at = gate_up_E2PK + (owner * 2 * P + rows[:, None]) * K + columns[None, :]
    up_at = gate_at + P * K
    gate_scales = scales + (owner * 2 * (P // SIZE) + tile * ROWS // SIZE) * column_blocks
    up_scales = gate_scales + P // SIZE * column_blocks
    x_at = x_MK + tokens[:, None] * x_row + columns[None, :]
    x_scales_at = x_scales_MKb + tokens
    gate = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    for here in range(column_blocks):
        valid = (columns < K - here * SIZE)[None, :]
        if EVEN:
            gate_codes, up_codes = tl.load(gate_at), tl.load(up_at)
        else:
            gate_codes = tl.load(gate_at, mask=valid, other=0.0)
            up_codes = tl.load(up_at, mask=valid, other=0.0)
        gate_scale, up_scale = tl.load(gate_scales + here), tl.load(up_scales + here)
        codes, scale = _activations(x_at, x_scales_at, valid, QUANTIZED, POW2, EVEN, HARDWARE)
        codes = tl.trans(codes)
        gate_part = tl.dot(gate_codes.to(tl.float8e4nv, bitcast=True), codes)
        up_part = tl.dot(up_codes.to(tl.float8e4nv, bitcast=True), codes)
        gate += gate_part * (scale * gate_scale)[None, :]
        up += up_part * (scale * up_scale)[None, :]
        gate_at += SIZE
        up_at += SIZE
        x_at += SIZE
        x_scales_at += x_scales_column
    gate = active(rounded(gate, DTYPE, HARDWARE), ACTIVATION)
    values = rounded(rounded(gate, DTYPE, HARDWARE) * rounded(up, DTYPE, HARDWARE), DTYPE, HARDWARE)
    written = (slots < S)[None, :]
    out_at = out_SP + slots.to(tl.int64)[None, :] * P + rows[:, None]
    if ROWS == SIZE:
        scale = scale_of(tl.max(magnitude_bits(values), axis=0), POW2)
        codes = codes_of(values, scale[None, :], True, HARDWARE)
        if out_SP.dtype.element_ty == tl.float8e4nv:
            tl.store(out_at, codes.to(tl.float8e4nv, bitcast=True), mask=written)
        else:
            tl.store(out_at, codes, mask=written)
        tl.store(out_scales_SPb + slots + tile * out_scales_column, scale, mask=slots < S)
    else:
        tl.store(out_at, values.to(DTYPE), mask=written)


@triton.jit(do_not_specialize=["S", "x_scales_column"])
def _down(
    x_SP,
    x_scales_SPb,
    down_EKP,
    scales,
    slots_R,
    owners_B,
    parts_SK,
    S,
    K,
    P,
    x_scales_column,
    QUANTIZED: tl.constexpr,
    ALONE: tl.constexpr,
    POW2: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: `ROWS` rows of down of one expert, one block of its tokens. Writes fp32."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, tile = tl.program_id(0), tl.program_id(1)
    owner = tl.load(owners_B + block).to(tl.int64)
    if owner < 0:
        return
    slots, sources = _slots(slots_R, block, S, ALONE, TOKENS)
    sources = sources.to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE)
    column_blocks = P // SIZE
    # rows beyond the last read the last, and are not written
    down_at = down_EKP + (owner * K + tl.minimum(rows, K - 1)[:, None]) * P + columns[None, :]
    down_scales = scales + (owner * tl.cdiv(K, SIZE) + tile * ROWS // SIZE) * column_blocks
    x_at = x_SP + sources[:, None] * P + columns[None, :]
    x_scales_at = x_scales_SPb + sources
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for here in range(column_blocks):
        weight = tl.load(down_at).to(tl.float8e4nv, bitcast=True)
        down_scale = tl.load(down_scales + here)
        codes, scale = _activations(x_at, x_scales_at, None, QUANTIZED, POW2, True, HARDWARE)
        sums += tl.dot(weight, tl.trans(codes)) * (scale * down_scale)[None, :]
        down_at += SIZE
        x_at += SIZE
        x_scales_at += x_scales_column
    written = (slots < S)[None, :] if EVEN else (slots < S)[None, :] & (rows < K)[:, None]
    tl.store(parts_SK + slots.to(tl.int64)[None, :] * K + rows[:, None], sums, mask=written)


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def expert_mlp(
    x_MK: Tensor,
    gate_up_E2PK: Tensor,
    gate_up_scales: Tensor,
    down_EKP: Tensor,
    down_scales: Tensor,
    weights_MT: Tensor,
    experts_MT: Tensor,
    activation: str,
    scale_format: ScaleFormat,
    cut: Cut,
) -> Tensor:
    """`reference_experts` of codes and scales; everything contiguous, rows of `x_MK` (BF16 or FP16) may lie apart.

    Raises:
        ValueError: sizes or a cut that it does not take.
    """
    (m, k), (e, height, _), t = x_MK.shape, gate_up_E2PK.shape, experts_MT.shape[1]
    p, s = height // 2, m * t
    if p % BLOCK or cut.rows not in (64, BLOCK) or cut.down_rows not in (64, BLOCK) or x_MK.stride(1) != 1:
        raise ValueError(
            f"expert_mlp: expected an intermediate size in multiples of {BLOCK}, contiguous columns and parts of 64 or "
            f"{BLOCK} rows, found {p}, strides {x_MK.stride()} and {cut}"
        )
    if not s:
        return torch.zeros_like(x_MK)
    device, early = x_MK.device, x_MK.is_cuda
    whole = cut.rows == BLOCK
    activations, x_scales = (x_MK, x_MK) if cut.inside else quantize_activation(x_MK, scale_format)
    if cut.alone:
        slots = owners = experts_MT
    else:
        slots, owners, *_ = expert_rows(experts_MT, e, cut.tokens)
    count = s if cut.alone else owners.shape[0]
    middle, middle_scales = empty(s, p, device)
    if not whole:
        middle = torch.empty(s, p, dtype=x_MK.dtype, device=device)
    parts = torch.empty(s, k, dtype=torch.float32, device=device)
    common = {
        "ALONE": cut.alone,
        "POW2": scale_format == "pow2",
        "EVEN": k % BLOCK == 0,
        "TOKENS": cut.tokens,
        "SIZE": BLOCK,
        "HARDWARE": early,
        "EARLY": early,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        **({"launch_pdl": True} if early else {}),
    }
    _gate_up[(count, p // cut.rows)](
        *(_codes(activations), x_scales, _codes(gate_up_E2PK), gate_up_scales, slots, owners),
        *(_codes(middle), middle_scales, s, k, p, activations.stride(0)),
        *(0 if cut.inside else x_scales.stride(1), middle_scales.stride(1)),
        CHOSEN=t,
        ACTIVATION=activation,
        DTYPE=_TYPES[x_MK.dtype],
        QUANTIZED=not cut.inside,
        ROWS=cut.rows,
        **common,
    )
    _down[(count, -(-k // cut.down_rows))](
        *(_codes(middle), middle_scales, _codes(down_EKP), down_scales, slots, owners, parts),
        *(s, k, p, middle_scales.stride(1)),
        QUANTIZED=whole,
        ROWS=cut.down_rows,
        **common,
    )
    return expert_sum(parts, None, weights_MT, experts_MT, x_MK.dtype)


def _codes(tensor: Tensor) -> Tensor:
    """Triton's interpreter reads codes as bytes; compiled, they are fetched as what they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn and not tensor.is_cuda else tensor
