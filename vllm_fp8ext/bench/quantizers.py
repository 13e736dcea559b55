# SPDX-License-Identifier: Apache-2.0
"""Quantizers of weights and of activations against what they replace and against a copy."""

import itertools
from functools import partial

import torch
from torch import Tensor

from vllm_fp8ext.bench.correct import gated, rmsnorm, same
from vllm_fp8ext.bench.report import Calls, Report
from vllm_fp8ext.kernels import bench, cases, reference
from vllm_fp8ext.kernels.gated_quantize import ACTIVATIONS, Activation, gated_quantize
from vllm_fp8ext.kernels.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.quantize_weight_triton import launch
from vllm_fp8ext.kernels.reference import ScaleFormat, blocks
from vllm_fp8ext.kernels.rmsnorm_quantize import rmsnorm_quantize

FORMATS: tuple[ScaleFormat, ...] = ("fp32", "pow2")


def weights(report: Report) -> None:
    """Each projection in both formats, and a whole model. Rivals: `compiled`, the reference through `torch.compile`, and a
    `copy` of as many bytes."""
    compiled = torch.compile(_reference, dynamic=True)
    for (n, k), form in itertools.product(cases.LINEAR.values(), FORMATS):
        if report.late(f"quantize_weight {n}x{k}"):
            return
        weight = cases.weight(n, k, "cuda")
        expected = reference.quantize_weight(weight, form)
        sets = [(weight.clone(), *_destination(n, k)) for _ in range(bench.copies(3 * n * k))]
        sums = torch.empty(blocks(n), blocks(k), 3, device="cuda")
        calls: Calls = {
            "blockfp8": partial(_quantize, sets, form, None),
            "blockfp8_sums": partial(_quantize, sets, form, sums),
        }
        exact = {}
        for variant, call in calls.items():
            sets[0][1].view(torch.uint8).fill_(0x7F)
            call(0)
            exact[variant] = same(sets[0][1], expected[0]) and same(sets[0][2], expected[1])
        calls["compiled"] = partial(_compiled, compiled, sets, form)
        calls["copy"] = partial(_copy, sets, n * 3 // 4)
        moved = dict.fromkeys(calls, 3 * n * k + blocks(n) * blocks(k) * 4)
        timings = bench.measure(calls, dict.fromkeys(calls, len(sets)))
        report.add("quantize_weight", (n, k, form), None, timings, moved, baseline="compiled", exact=exact)
    model = [
        (cases.weight(n, k, "cuda"), *_destination(n, k))
        for _ in range(cases.LAYERS)
        for n, k in cases.LINEAR.values()
    ]

    def whole(_: int) -> None:
        for part in model:
            launch(*part, "fp32")

    timings = bench.measure({"blockfp8": whole}, {"blockfp8": 1})
    total = sum(3 * codes.numel() + 4 * scales.numel() for _, codes, scales in model)
    report.add(
        "quantize_weight", ("Qwen3-8B",), None, timings, {"blockfp8": total}, baseline="blockfp8", exact={}
    )


def fused(report: Report) -> None:
    """Norms and gated activation functions that quantize, against `separate` launches."""
    for m in (*cases.DECODE_TOKENS, *cases.PREFILL_TOKENS):
        if report.late(f"fused kernels m={m}"):
            return
        _norm(report, m, 4096)
        for activation in ACTIVATIONS:
            _gate(report, activation, m, 12288)


def _quantize(
    sets: list[tuple[Tensor, Tensor, Tensor]], form: ScaleFormat, sums: Tensor | None, i: int
) -> None:
    launch(*sets[i], form, sums)


def _compiled(compiled: object, sets: list[tuple[Tensor, Tensor, Tensor]], form: ScaleFormat, i: int) -> None:
    assert callable(compiled)
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


def _norm(report: Report, m: int, k: int) -> None:
    sets = [
        (cases.activations(m, k, "cuda"), cases.activations(m, k, "cuda", 3))
        for _ in range(min(64, bench.copies(m * k * 7)))
    ]
    scaling = torch.ones(k, device="cuda").bfloat16()

    def separate(i: int) -> object:
        total = sets[i][0] + sets[i][1]
        return total, quantize_activation(torch.nn.functional.rms_norm(total, (k,), scaling, 1e-6), "fp32")

    calls: Calls = {
        "blockfp8": lambda i: rmsnorm_quantize(*sets[i], scaling, 1e-6, "fp32"),
        "separate": separate,
    }
    moved = dict.fromkeys(calls, m * (k * 7 + blocks(k) * 4))
    timings = bench.measure(calls, dict.fromkeys(calls, len(sets)))
    exact = {"blockfp8": rmsnorm("fp32", min(m, 64), k)[0]}
    report.add("rmsnorm_quantize", (k,), m, timings, moved, baseline="separate", exact=exact)


def _gate(report: Report, activation: Activation, m: int, k: int) -> None:
    sets = [cases.activations(m, 2 * k, "cuda") / 8 for _ in range(min(64, bench.copies(m * k * 5)))]

    def separate(i: int) -> object:
        gate, up = sets[i].chunk(2, 1)
        if activation == "silu":
            return quantize_activation(torch.nn.functional.silu(gate) * up, "fp32")
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return quantize_activation(torch.nn.functional.gelu(gate, approximate=approximate) * up, "fp32")

    calls: Calls = {
        "blockfp8": lambda i: gated_quantize(sets[i], activation, "fp32"),
        "separate": separate,
    }
    moved = dict.fromkeys(calls, m * (k * 5 + blocks(k) * 4))
    timings = bench.measure(calls, dict.fromkeys(calls, len(sets)))
    exact = {"blockfp8": gated(activation, "fp32", min(m, 64), k)[0]}
    report.add(f"{activation}_mul_quantize", (k,), m, timings, moved, baseline="separate", exact=exact)
