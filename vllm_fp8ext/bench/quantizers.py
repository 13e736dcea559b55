# SPDX-License-Identifier: Apache-2.0
"""Quantizers of weights and of activations against what they replace and against a copy."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from vllm_fp8ext.bench.correct import alike, nearly, normed
from vllm_fp8ext.bench.report import Calls, Report
from vllm_fp8ext.bench.rivals import add_rms_norm, gate, stock_quantizer, turn_heads
from vllm_fp8ext.kernels.attention.norm_rope import norm_rope, norm_rope_reference
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat, blocks
from vllm_fp8ext.kernels.quantize.gated_quantize import (
    ACTIVATIONS,
    Activation,
    gated_quantize,
    gated_quantize_reference,
)
from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.quantize.quantize_weight_triton import launch
from vllm_fp8ext.kernels.quantize.rmsnorm_quantize import rmsnorm_quantize
from vllm_fp8ext.kernels.testing import kernel_cases, kernel_timing

FORMATS: tuple[ScaleFormat, ...] = ("fp32", "pow2")


def weights(report: Report) -> None:
    """Each projection in both formats, a whole model, and a layer of experts. Rivals: `compiled`, the reference through
    `torch.compile`, and a `copy` of as many bytes. `blockfp8_sums`: with the sums that an update takes."""
    compiled = torch.compile(_reference, dynamic=True)
    for (n, k), form in itertools.product(kernel_cases.LINEAR.values(), FORMATS):
        if report.late(f"quantize_weight {n}x{k}"):
            return
        weight = kernel_cases.weight(n, k, "cuda")
        sets = [(weight.clone(), *_destination(n, k)) for _ in range(kernel_timing.copies(3 * n * k))]
        sums = torch.empty(blocks(n), blocks(k), 3, device="cuda")
        calls: Calls = {
            "blockfp8": partial(_quantize, sets, form, None),
            "blockfp8_sums": partial(_quantize, sets, form, sums),
        }
        calls["compiled"] = partial(_compiled, compiled, sets, form)
        exact = {variant: quantizes_right(call, sets[:1], form) for variant, call in calls.items()}
        calls["copy"] = partial(_copy, sets, n * 3 // 4)
        moved = dict.fromkeys(calls, 3 * n * k + blocks(n) * blocks(k) * 4)
        timings = kernel_timing.measure(calls, dict.fromkeys(calls, len(sets)))
        report.add("quantize_weight", (n, k, form), None, timings, moved, baseline="compiled", exact=exact)
    model = [*kernel_cases.LINEAR.values()] * kernel_cases.LAYERS
    for form in FORMATS:
        _together(report, "quantize_weight", ("Qwen3-8B", form), model, form, compiled)
    experts, width, hidden = kernel_cases.EXPERTS
    shapes = [(experts * 2 * width, hidden), (experts * hidden, width)]
    _together(report, "quantize_experts", (experts, 3 * width, hidden), shapes, "fp32", compiled)


def _together(
    report: Report,
    kernel: str,
    shape: tuple[int | str, ...],
    shapes: Sequence[tuple[int, int]],
    form: ScaleFormat,
    compiled: Callable[..., None],
) -> None:
    """Weights of these shapes one after the other: of a whole model, or of all experts of a layer."""
    if report.late(kernel):
        return
    parts = [(kernel_cases.weight(n, k, "cuda"), *_destination(n, k)) for n, k in shapes]
    sums = [torch.empty(*scales.shape, 3, device="cuda") for _, _, scales in parts]

    def alone(_: int) -> None:
        for part in parts:
            launch(*part, form)

    def with_sums(_: int) -> None:
        for part, part_sums in zip(parts, sums, strict=True):
            launch(*part, form, part_sums)

    def by_inductor(_: int) -> None:
        for part in parts:
            compiled(*part, form)

    calls: Calls = {"blockfp8": alone, "blockfp8_sums": with_sums, "compiled": by_inductor}
    exact = {variant: quantizes_right(call, parts, form) for variant, call in calls.items()}
    timings = kernel_timing.measure(
        calls, dict.fromkeys(calls, 1), least=2
    )  # each queues a launch for every weight
    total = sum(3 * codes.numel() + 4 * scales.numel() for _, codes, scales in parts)
    moved = dict.fromkeys(calls, total) | {
        "blockfp8_sums": total + 4 * sum(part_sums.numel() for part_sums in sums)
    }
    report.add(kernel, shape, None, timings, moved, baseline="compiled", exact=exact)


def quantizes_right(
    call: Callable[[int], object], parts: Sequence[tuple[Tensor, Tensor, Tensor]], form: ScaleFormat
) -> bool:
    """Check that a call gives each weight the reference's codes and scales, bit for bit."""
    for _, codes, scales in parts:
        codes.view(torch.uint8).fill_(0x7F)
        scales.fill_(torch.nan)
    call(0)
    return all(
        torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        for weight, *written in parts
        for actual, expected in zip(written, reference.quantize_weight(weight, form), strict=True)
    )


def fused(report: Report) -> None:
    """Time norms, gated activation functions and rotary embedding that quantize.

    Rivals: vLLM's kernels and a launch that quantizes (`separate`); that launch is compared with vLLM's, too."""
    for m in (*kernel_cases.DECODE_TOKENS, *kernel_cases.PREFILL_TOKENS):
        if report.late(f"fused kernels m={m}"):
            return
        _plain(report, m, 4096)
        _norm(report, m, 4096)
        for activation in ACTIVATIONS:
            _gate(report, activation, m, 12288)
        _heads(report, m)


def _quantize(
    sets: list[tuple[Tensor, Tensor, Tensor]], form: ScaleFormat, sums: Tensor | None, i: int
) -> None:
    launch(*sets[i], form, sums)


def _compiled(
    compiled: Callable[..., None], sets: list[tuple[Tensor, Tensor, Tensor]], form: ScaleFormat, i: int
) -> None:
    compiled(*sets[i], form)


def _copy(sets: list[tuple[Tensor, Tensor, Tensor]], rows: int, i: int) -> None:
    sets[i][0][:rows].copy_(sets[i - 1][0][:rows])


def _reference(weight: Tensor, codes: Tensor, scales: Tensor, form: ScaleFormat) -> None:
    tiles = reference._tiles(weight)
    scales.copy_(reference.scale_of(tiles.abs().amax(dim=(1, 3)), form))
    codes.copy_(reference._round(tiles / scales[:, None, :, None]).view(codes.shape))


def _destination(n: int, k: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(n, k, dtype=reference.FP8_DTYPE, device="cuda")
    return codes, torch.empty(blocks(n), blocks(k), device="cuda")


def _compare(
    report: Report,
    kernel: str,
    shape: tuple[int, ...],
    m: int,
    calls: Calls,
    *,
    right: bool,
    copies: int,
    moved: int,
) -> None:
    """`right`: what is timed as `blockfp8` was within its bound. `moved`: fewest bytes of one call."""
    timings = kernel_timing.measure(calls, dict.fromkeys(calls, copies))
    everywhere = dict.fromkeys(calls, moved)
    report.add(kernel, shape, m, timings, everywhere, baseline="separate", exact={"blockfp8": right})


def _copies(operand_bytes: int) -> int:
    return min(64, kernel_timing.copies(operand_bytes))


def _plain(report: Report, m: int, k: int) -> None:
    """Time the quantization of activations that no producer quantizes. Rival: vLLM's kernel (`separate`)."""
    sets = [kernel_cases.activations(m, k, "cuda") for _ in range(_copies(m * k * 3))]
    theirs = stock_quantizer(aligned=True)

    def ours(i: int) -> Quantized:
        return quantize_activation(sets[i], "fp32")

    calls: Calls = {"blockfp8": ours, "separate": lambda i: theirs(sets[i])}
    expected = reference.quantize_activation(sets[0], "fp32")
    right = all(kernel_cases.same(a, b) for a, b in zip(ours(0), expected, strict=True))
    moved = m * (k * 3 + blocks(k) * 4)
    _compare(report, "quantize_activation", (k,), m, calls, right=right, copies=len(sets), moved=moved)


def _norm(report: Report, m: int, k: int) -> None:
    sets = [
        (kernel_cases.activations(m, k, "cuda"), kernel_cases.activations(m, k, "cuda", 3))
        for _ in range(_copies(m * k * 7))
    ]
    others = [(x.clone(), residual.clone()) for x, residual in sets]  # vLLM's kernel writes into both
    scaling = torch.ones(k, device="cuda").bfloat16()

    def ours(i: int) -> tuple[Quantized, Tensor]:
        return rmsnorm_quantize(*sets[i], scaling, 1e-6, "fp32", small_m=m in kernel_cases.DECODE_TOKENS)

    def separate(i: int) -> object:
        add_rms_norm(*others[i], scaling, 1e-6)
        return quantize_activation(others[i][0], "fp32")

    calls: Calls = {"blockfp8": ours, "separate": separate}
    right = normed(ours(0), *sets[0], scaling, "fp32")[0]
    moved = m * (k * 7 + blocks(k) * 4)
    _compare(report, "rmsnorm_quantize", (k,), m, calls, right=right, copies=len(sets), moved=moved)


def _gate(report: Report, activation: Activation, m: int, k: int) -> None:
    sets = [kernel_cases.activations(m, 2 * k, "cuda") / 8 for _ in range(_copies(m * k * 5))]

    def ours(i: int) -> Quantized:
        return gated_quantize(sets[i], activation, "fp32")

    def separate(i: int) -> object:
        out = torch.empty(m, k, dtype=torch.bfloat16, device="cuda")
        gate(activation, out, sets[i])
        return quantize_activation(out, "fp32")

    calls: Calls = {"blockfp8": ours, "separate": separate}
    right = nearly(ours(0), gated_quantize_reference(sets[0], activation, "fp32"))[0]
    kernel, moved = f"{activation}_mul_quantize", m * (k * 5 + blocks(k) * 4)
    _compare(report, kernel, (k,), m, calls, right=right, copies=len(sets), moved=moved)


def _heads(report: Report, m: int) -> None:
    """`compiled`: what Inductor makes of the reference, as it does in a compiled model."""
    heads, kv_heads, size = kernel_cases.Q_HEADS, kernel_cases.KV_HEADS, kernel_cases.HEAD_DIM
    columns = (heads + 2 * kv_heads) * size
    positions, table, norms, scale = kernel_cases.rotary(m, "cuda")
    sets = [kernel_cases.activations(m, columns, "cuda") for _ in range(_copies(m * columns * 2))]
    others = [qkv.clone() for qkv in sets]  # vLLM's kernel writes into them
    rest = (positions, table, norms, scale, heads, kv_heads)
    compiled = torch.compile(norm_rope_reference, dynamic=True)

    def ours(i: int) -> tuple[Tensor, ...]:
        return norm_rope(sets[i], *rest)

    calls: Calls = {
        "blockfp8": ours,
        "separate": lambda i: turn_heads(
            others[i], positions, table, norms.query_D, norms.key_D, scale, heads, kv_heads
        ),
        "compiled": lambda i: compiled(sets[i], *rest),
    }
    right = alike(ours(0), norm_rope_reference(sets[0], *rest))[0]
    moved = m * size * ((heads + kv_heads) * 2 + heads + kv_heads * 2)
    shape = (heads, kv_heads, size)
    _compare(report, "norm_rope", shape, m, calls, right=right, copies=len(sets), moved=moved)
