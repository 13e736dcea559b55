# SPDX-License-Identifier: Apache-2.0
"""`reference_experts` on a Hopper GPU for small M.

The time goes into reading the weights of many experts, in two grouped GEMMs, the first with the gate, and a sum.
Weights are the left operand: tensor cores want 64 rows there, and take few columns. Each expert's tokens come in blocks, from
its list (`expert_slots`). Every sum has a fixed order.

Each of the launches begins while the one before still runs, and may then fetch weights, which no launch before it writes. It
lets the next one begin once it has itself waited: what the next one reads before it waits is then older than this launch.

Shape suffixes: as in `layers/experts.py` and `expert_slots.py`; Kb and Pb count blocks of 128.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.memory.prefetch import prefetch_rows
from vllm_fp8ext.kernels.moe.expert_configs import ExpertTileConfig
from vllm_fp8ext.kernels.moe.expert_slots import SCANNED, expert_slots, has_slot, taken
from vllm_fp8ext.kernels.moe.expert_sum import expert_sum
from vllm_fp8ext.kernels.numerics.quantized import empty
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat
from vllm_fp8ext.kernels.numerics.triton_numerics import (
    codes_of,
    magnitude_bits,
    quantized,
    rounded,
    scale_of,
)
from vllm_fp8ext.kernels.quantize.gated_quantize import active


@triton.jit
def _activations(x_at, scales_at, QUANTIZED: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes and scales of a block of activations: as they lie there, or quantized here."""
    if QUANTIZED:
        return tl.load(x_at).to(tl.float8e4nv, bitcast=True), tl.load(scales_at)
    codes, scale = quantized(tl.load(x_at).to(tl.float32), POW2, True, HARDWARE)
    return codes.to(tl.float8e4nv, bitcast=True), scale


@triton.jit(do_not_specialize=["S", "room", "x_scales_column", "out_scales_column"])
def _gate_up(
    x_MK,
    x_scales_MKb,
    gate_up_E2PK,
    scales,
    experts_S,
    slots_E,
    counts_E,
    out_SP,
    out_scales_SPb,
    S,
    room,
    K,
    P,
    x_scales_column,
    out_scales_column,
    CHOSEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    ALONE: tl.constexpr,
    AHEAD: tl.constexpr,
    POW2: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    SCANNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: `ROWS` rows of gate and of up of one expert, all blocks of its tokens; or of one slot. Writes
    `activation(gate) * up`, quantized where it has a whole block of columns."""
    expert, tile = tl.program_id(0), tl.program_id(1)
    owner = expert.to(tl.int64)
    if ALONE:
        owner = tl.load(experts_S + expert, cache_modifier=".cg").to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    gate_rows = gate_up_E2PK + (owner * 2 * P + rows) * K
    if EARLY:
        if AHEAD:
            has_tokens = owner >= 0
            if not ALONE:
                has_tokens = has_slot(experts_S, expert, S, SCANNED)
            if has_tokens:
                prefetch_rows(gate_rows, min(K, AHEAD * SIZE), K - 1, ROWS, SIZE)
                prefetch_rows(gate_rows + P * K, min(K, AHEAD * SIZE), K - 1, ROWS, SIZE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if owner < 0:
        return
    count = 1
    if not ALONE:
        count = tl.load(counts_E + expert)
    columns = tl.arange(0, SIZE)
    column_blocks = tl.cdiv(K, SIZE)
    gate_scales = scales + (owner * 2 * (P // SIZE) + tile * ROWS // SIZE) * column_blocks
    up_scales = gate_scales + P // SIZE * column_blocks
    for first in range(0, count, TOKENS):
        slots, sources = taken(slots_E, count, expert, first, S, room, ALONE, TOKENS)
        tokens = (sources // CHOSEN).to(tl.int64)
        gate_at = gate_rows[:, None] + columns[None, :]
        up_at = gate_at + P * K
        x_at = x_MK + tokens[:, None] * K + columns[None, :]
        x_scales_at = x_scales_MKb + tokens
        gate = tl.zeros((ROWS, TOKENS), tl.float32)
        up = tl.zeros((ROWS, TOKENS), tl.float32)
        for here in range(column_blocks):
            valid = (columns < K - here * SIZE)[None, :]
            if EVEN:
                gate_codes, up_codes, codes = tl.load(gate_at), tl.load(up_at), tl.load(x_at)
            else:
                gate_codes = tl.load(gate_at, mask=valid, other=0.0)
                up_codes = tl.load(up_at, mask=valid, other=0.0)
                codes = tl.load(x_at, mask=valid, other=0.0)
            gate_scale, up_scale = tl.load(gate_scales + here), tl.load(up_scales + here)
            scale = tl.load(x_scales_at)
            codes = tl.trans(codes.to(tl.float8e4nv, bitcast=True))
            gate_part = tl.dot(gate_codes.to(tl.float8e4nv, bitcast=True), codes)
            up_part = tl.dot(up_codes.to(tl.float8e4nv, bitcast=True), codes)
            gate += gate_part * (scale * gate_scale)[None, :]
            up += up_part * (scale * up_scale)[None, :]
            gate_at += SIZE
            up_at += SIZE
            x_at += SIZE
            x_scales_at += x_scales_column
        gate = active(rounded(gate, DTYPE, HARDWARE), ACTIVATION, HARDWARE)
        values = rounded(rounded(gate, DTYPE, HARDWARE) * rounded(up, DTYPE, HARDWARE), DTYPE, HARDWARE)
        written = (slots < S)[None, :]
        out_at = out_SP + slots.to(tl.int64)[None, :] * P + rows[:, None]
        if ROWS == SIZE:
            scale = scale_of(tl.max(magnitude_bits(values), axis=0), POW2, HARDWARE)
            codes = codes_of(values, scale[None, :], True, HARDWARE)
            if out_SP.dtype.element_ty == tl.float8e4nv:
                tl.store(out_at, codes.to(tl.float8e4nv, bitcast=True), mask=written)
            else:
                tl.store(out_at, codes, mask=written)
            tl.store(out_scales_SPb + slots + tile * out_scales_column, scale, mask=slots < S)
        else:
            tl.store(out_at, values.to(DTYPE), mask=written)


@triton.jit(do_not_specialize=["S", "room", "x_scales_column"])
def _down(
    x_SP,
    x_scales_SPb,
    down_EKP,
    scales,
    experts_S,
    slots_E,
    counts_E,
    parts_SK,
    S,
    room,
    K,
    P,
    x_scales_column,
    QUANTIZED: tl.constexpr,
    ALONE: tl.constexpr,
    AHEAD: tl.constexpr,
    POW2: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: `ROWS` rows of down of one expert, all blocks of its tokens; or of one slot. Writes fp32."""
    expert, tile = tl.program_id(0), tl.program_id(1)
    owner, count = expert.to(tl.int64), 1
    # was there before the previous launch, which is still writing activations
    if ALONE:
        owner = tl.load(experts_S + expert, cache_modifier=".cg").to(tl.int64)
    else:
        count = tl.load(counts_E + expert, cache_modifier=".cg")
    rows = tile * ROWS + tl.arange(0, ROWS)
    # rows beyond the last read the last, and are not written
    down_rows = down_EKP + (owner * K + tl.minimum(rows, K - 1)) * P
    if EARLY:
        if AHEAD:
            has_tokens = (owner >= 0) & (count > 0)
            if has_tokens:
                prefetch_rows(down_rows, min(P, AHEAD * SIZE), P - 1, ROWS, SIZE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if owner < 0:
        return
    columns = tl.arange(0, SIZE)
    column_blocks = P // SIZE
    down_scales = scales + (owner * tl.cdiv(K, SIZE) + tile * ROWS // SIZE) * column_blocks
    for first in range(0, count, TOKENS):
        slots, sources = taken(slots_E, count, expert, first, S, room, ALONE, TOKENS)
        sources = sources.to(tl.int64)
        down_at = down_rows[:, None] + columns[None, :]
        x_at = x_SP + sources[:, None] * P + columns[None, :]
        x_scales_at = x_scales_SPb + sources
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        for here in range(column_blocks):
            weight = tl.load(down_at).to(tl.float8e4nv, bitcast=True)
            down_scale = tl.load(down_scales + here)
            codes, scale = _activations(x_at, x_scales_at, QUANTIZED, POW2, HARDWARE)
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
    config: ExpertTileConfig,
) -> Tensor:
    """`reference_experts` of codes and scales; everything contiguous, rows of `x_MK` (BF16 or FP16) may lie apart.

    Raises:
        ValueError: sizes or a tile config that it does not take.
    """
    (m, k), (e, height, _), t = x_MK.shape, gate_up_E2PK.shape, experts_MT.shape[1]
    p, s = height // 2, m * t
    _require(p, x_MK, config)
    if not s:
        return torch.zeros_like(x_MK)
    device, early = x_MK.device, x_MK.is_cuda
    whole = config.rows == BLOCK
    quantized, listed = expert_slots(x_MK, experts_MT, e, scale_format, listed=not config.alone)
    lists = experts_MT, listed.slots, listed.counts
    count, room = s if config.alone else e, listed.slots.shape[1]
    middle, middle_scales = empty(s, p, device)
    if not whole:
        middle = torch.empty(s, p, dtype=x_MK.dtype, device=device)
    parts = torch.empty(s, k, dtype=torch.float32, device=device)
    common = _constants(config, k, scale_format, early=early)
    _gate_up[(count, p // config.rows)](
        *(_codes(quantized.codes), quantized.scales, _codes(gate_up_E2PK), gate_up_scales, *lists),
        *(_codes(middle), middle_scales, s, room, k, p, quantized.scales.stride(1), middle_scales.stride(1)),
        CHOSEN=t,
        ACTIVATION=activation,
        DTYPE=_TYPES[x_MK.dtype],
        ROWS=config.rows,
        SCANNED=SCANNED,
        **common,
    )
    _down[(count, -(-k // config.down_rows))](
        *(_codes(middle), middle_scales, _codes(down_EKP), down_scales, *lists, parts),
        *(s, room, k, p, middle_scales.stride(1)),
        QUANTIZED=whole,
        ROWS=config.down_rows,
        **common,
    )
    return expert_sum(parts, None, weights_MT, experts_MT, x_MK.dtype)


def _constants(config: ExpertTileConfig, k: int, scale_format: ScaleFormat, *, early: bool) -> dict[str, Any]:
    """Return the compile-time constants that both launches have."""
    return {
        "ALONE": config.alone,
        "AHEAD": config.ahead,
        "POW2": scale_format == "pow2",
        "EVEN": k % BLOCK == 0,
        "TOKENS": config.tokens,
        "SIZE": BLOCK,
        "HARDWARE": early,
        "EARLY": early,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **({"launch_pdl": True} if early else {}),
    }


def _require(p: int, x_MK: Tensor, config: ExpertTileConfig) -> None:
    """Raise `ValueError` unless the kernels take these sizes."""
    rows = {config.rows, config.down_rows}
    if p % BLOCK or rows - {64, BLOCK} or x_MK.stride(1) != 1:
        raise ValueError(
            f"expert_mlp: expected an intermediate size in multiples of {BLOCK}, contiguous columns and parts of 64 or "
            f"{BLOCK} rows, found {p}, strides {x_MK.stride()} and {config}"
        )


def _codes(tensor: Tensor) -> Tensor:
    """Triton's interpreter reads codes as bytes; compiled, they are fetched as what they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn and not tensor.is_cuda else tensor
