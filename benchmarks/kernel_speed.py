# SPDX-License-Identifier: Apache-2.0
"""How fast the kernels are on this GPU, beside what else computes the same.

    python benchmarks/kernel_speed.py --out benchmarks/results/kernels_h200.json [--rivals scaled_mm cutlass deep_gemm]

Everything that is timed passes its bound in the same process first. Exit code 1 when a kernel of ours does not.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from kernel_check import gated, rmsnorm, same
from operands import Operands
from provenance import provenance
from rivals import NAMES, Gemm, rivals
from torch import Tensor

from vllm_fp8ext.kernels import (
    bench,
    cases,
    decode_gemm,
    decode_gemm_triton,
    quantize_weight_triton,
    reference,
)
from vllm_fp8ext.kernels.gated_quantize import ACTIVATIONS, Activation, gated_quantize
from vllm_fp8ext.kernels.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.quantized import Quantized
from vllm_fp8ext.kernels.reference import blocks
from vllm_fp8ext.kernels.rmsnorm_quantize import rmsnorm_quantize

Calls = dict[str, Callable[[int], object]]


class Report:
    """Collects cases in the form of the result file, which is written anew after each."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.provenance = provenance()
        self.cases: list[dict[str, Any]] = []
        self.bandwidth = bench.copy_bandwidth()
        self.stop = math.inf

    def late(self, what: str) -> bool:
        """Whether there is no time left for this."""
        late = time.perf_counter() > self.stop
        if late:
            print(f"no time left for {what}", flush=True)
        return late

    def add(
        self,
        kernel: str,
        shape: list[int | str],
        m: int | None,
        timings: Mapping[str, bench.Timing],
        moved: Mapping[str, int],
        *,
        baseline: str,
        exact: Mapping[str, bool],
        operations: int = 0,
    ) -> None:
        """`moved`: fewest bytes of each variant. `baseline`: the variant that `ratio_bf16` compares with."""
        for variant, timing in timings.items():
            case: dict[str, Any] = {"kernel": kernel, "shape": shape, "m": m, "variant": variant}
            case |= {"exact": exact.get(variant, True), "error": timing.error, "samples": timing.samples}
            if timing.samples:
                case |= {
                    "us": timing.us,
                    "gbps": moved[variant] / timing.us / 1e3,
                    "tflops": operations / timing.us / 1e6,
                    "ratio_bf16": timings[baseline].us / timing.us,
                    "ratio_copy": moved[variant] / timing.us * 1e6 / self.bandwidth,
                }
            self.cases.append(case)
            print(self._line(case), flush=True)
        if self.file:
            self.file.write_text(
                json.dumps({"provenance": self.provenance, "cases": self.cases}, indent=1) + "\n"
            )

    @staticmethod
    def _line(case: dict[str, Any]) -> str:
        line = f"{case['kernel']:18} {'x'.join(map(str, case['shape'])):12} m={case['m']!s:5} {case['variant']:15}"
        if not case["samples"]:
            return f"{line} {case['error'][:80]}"
        numbers = f"{case['us']:9.2f} us {case['ratio_bf16']:6.2f}x {case['ratio_copy']:7.1%} of copy"
        return f"{line} {numbers}{'' if case['exact'] else ' NOT WITHIN ITS BOUND'}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="quantize_weight, fused, decode or prefill")
    parser.add_argument("--rivals", nargs="*", choices=NAMES, default=["scaled_mm"])
    parser.add_argument(
        "--deep-gemm-tokens", type=int, nargs="*", default=[8], help="where DeepGEMM runs: it compiles long"
    )
    parser.add_argument("--prefill-tokens", type=int, nargs="*", default=cases.PREFILL_TOKENS)
    parser.add_argument("--decode-tokens", type=int, nargs="*", default=cases.DECODE_TOKENS)
    parser.add_argument("--seconds", type=float, default=60, help="begin no case after so long")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    report = Report(options.out)
    print(f"copy {report.bandwidth / 1e12:.2f} TB/s", flush=True)
    report.stop = start + options.seconds
    if options.only in ("", "decode"):
        decode(report, options.decode_tokens, options.rivals, options.deep_gemm_tokens)
    if options.only in ("", "prefill"):
        prefill(report, options.prefill_tokens)
    if options.only in ("", "quantize_weight"):
        quantize_weight(report)
    if options.only in ("", "fused"):
        fused(report)
    ratios = [
        case["ratio_bf16"]
        for case in report.cases
        if case["kernel"] == "decode_gemm" and case["variant"] == "blockfp8" and case["samples"]
    ] or [math.nan]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"decode GEMM against BF16: geometric mean {mean:.3f}, worst {min(ratios):.3f}")
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if all(case["exact"] for case in report.cases if case["variant"].startswith("blockfp8")) else 1


def decode(report: Report, tokens: list[int], names: list[str], deep_gemm_tokens: list[int]) -> None:
    others = rivals(names)
    here = {name: gemm if isinstance(gemm, str) else "here" for name, gemm in others.items()}
    print("rivals:", here, flush=True)
    gemms: dict[str, Gemm] = {
        "blockfp8": lambda x, codes, scales: decode_gemm.decode_gemm(x, codes, scales, None, "fp32"),
        "blockfp8_alone": _alone,
        "blockfp8_codes": _multiply_codes,
        "blockfp8_triton": _portable,
    } | {name: gemm for name, gemm in others.items() if not isinstance(gemm, str)}
    for n, k in cases.LINEAR.values():
        operands = Operands(n, k)
        for m in tokens:
            if report.late(f"decode_gemm {n}x{k} m={m}"):
                return
            x = cases.activations(m, k, "cuda")
            exact, calls = {}, _bf16(operands, x)
            quantized = quantize_activation(x, "fp32")
            for name, gemm in gemms.items():
                if name == "deep_gemm" and m not in deep_gemm_tokens:
                    continue
                given = quantized if gemm is _multiply_codes else x
                calls[name] = lambda i, g=gemm, x=given, o=operands: g(x, o.codes[i], o.scales)
                try:
                    exact[name] = operands.error(x, calls[name](0)) < 1
                except Exception:  # comes again below, where it is recorded
                    exact[name] = False
            passes = dict.fromkeys(calls, len(operands.codes)) | {"bf16": len(operands.weights)}
            moved = dict.fromkeys(calls, operands.fp8_bytes(m)) | {"bf16": operands.bf16_bytes(m)}
            timings = bench.measure(calls, passes)
            report.add(
                *("decode_gemm", [n, k], m, timings, moved),
                baseline="bf16",
                exact=exact,
                operations=2 * m * n * k,
            )


def _alone(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Ours when it may not start before the previous kernel has ended."""
    config = decode_gemm.choose(*codes.shape, decode_gemm.width(x.shape[0]))
    return decode_gemm.decode_gemm(x, codes, scales, None, "fp32", dataclasses.replace(config, early=False))


def _multiply_codes(x: Quantized, codes: Tensor, scales: Tensor) -> Tensor:
    """Ours when a fused norm or activation function has quantized x."""
    return decode_gemm.decode_gemm(x, codes, scales, None, "fp32")


def prefill(report: Report, tokens: list[int]) -> None:
    """Quantization and DeepGEMM; `blockfp8_codes` when a fused producer has quantized."""
    from vllm_fp8ext.compat.gemm import deep_gemm

    others = {
        name: gemm for name, gemm in rivals(["cutlass", "deep_gemm"]).items() if not isinstance(gemm, str)
    }
    for n, k in cases.LINEAR.values():
        operands = Operands(n, k)
        for m in tokens:
            if report.late(f"prefill_gemm {n}x{k} m={m}"):
                return
            x = cases.activations(m, k, "cuda")
            quantized = quantize_activation(x, "fp32")
            calls = _bf16(operands, x) | {
                "blockfp8": lambda i, x=x, o=operands: deep_gemm(
                    quantize_activation(x, "fp32"), o.codes[i], o.scales, torch.bfloat16
                ),
                "blockfp8_codes": lambda i, q=quantized, o=operands: deep_gemm(
                    q, o.codes[i], o.scales, torch.bfloat16
                ),
            }
            for name, gemm in others.items():
                label = "fp8_per_block" if name == "deep_gemm" else name
                calls[label] = lambda i, g=gemm, x=x, o=operands: g(x, o.codes[i], o.scales)
            few = x[:64]
            exact = {"blockfp8": operands.error(few, calls["blockfp8"](0)[:64]) < 1}
            passes = dict.fromkeys(calls, len(operands.codes)) | {"bf16": len(operands.weights)}
            moved = dict.fromkeys(calls, operands.fp8_bytes(m)) | {"bf16": operands.bf16_bytes(m)}
            timings = bench.measure(calls, passes)
            report.add(
                *("prefill_gemm", [n, k], m, timings, moved),
                baseline="bf16",
                exact=exact,
                operations=2 * m * n * k,
            )


def _bf16(operands: Operands, x: Tensor) -> Calls:
    return {"bf16": lambda i: torch.nn.functional.linear(x, operands.weights[i])}


def _portable(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    tiles = -(-codes.shape[0] // 128)
    config = decode_gemm_triton.Config(splits=max(1, min(8, 132 // tiles)))
    return decode_gemm_triton.decode_gemm_triton(x, codes, scales, None, "fp32", config)


def quantize_weight(report: Report) -> None:
    compiled = torch.compile(_reference_weight, dynamic=True)
    for name, (n, k) in cases.LINEAR.items():
        if report.late(f"quantize_weight {n}x{k}"):
            return
        weight = cases.weight(n, k, "cuda")
        expected = reference.quantize_weight(weight)
        sets = [(weight.clone(), *_destination(n, k)) for _ in range(bench.copies(3 * n * k))]
        sums = torch.empty(blocks(n), blocks(k), 2, device="cuda")
        calls: Calls = {
            "blockfp8": lambda i, s=sets: quantize_weight_triton.launch(*s[i], "fp32"),
            "blockfp8_sums": lambda i, s=sets, t=sums: quantize_weight_triton.launch(*s[i], "fp32", t),
        }
        for warps, early in ((4, False), (8, True), (16, True)):
            label = f"blockfp8_w{warps}{'' if early else '_alone'}"
            calls[label] = lambda i, s=sets, w=warps, e=early: quantize_weight_triton.launch(
                *s[i], "fp32", warps=w, early=e
            )
        exact = {}
        for variant, call in calls.items():
            sets[0][1].view(torch.uint8).fill_(0x7F)
            call(0)
            exact[variant] = same(sets[0][1], expected[0]) and same(sets[0][2], expected[1])
        if name == "o":
            calls["compiled"] = lambda i, s=sets: compiled(*s[i])
        rows = n * 3 // 4
        calls["copy"] = lambda i, s=sets, r=rows: s[i][0][:r].copy_(s[i - 1][0][:r])
        moved = dict.fromkeys(calls, 3 * n * k + blocks(n) * blocks(k) * 4)
        timings = bench.measure(calls, dict.fromkeys(calls, len(sets)))
        report.add("quantize_weight", [n, k], None, timings, moved, baseline="copy", exact=exact)
    model = [
        (cases.weight(n, k, "cuda"), *_destination(n, k))
        for _ in range(cases.LAYERS)
        for n, k in cases.LINEAR.values()
    ]
    timings = bench.measure(
        {"blockfp8": lambda _: [quantize_weight_triton.launch(*part, "fp32") for part in model]},
        {"blockfp8": 1},
    )
    total = sum(3 * part[0].numel() + 4 * part[2].numel() for part in model)
    report.add(
        *("quantize_weight", ["Qwen3-8B"], None, timings, {"blockfp8": total}),
        baseline="blockfp8",
        exact={},
    )


def _reference_weight(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    tiles = reference._tiles(weight)
    scales.copy_(reference.scale_of(tiles.abs().amax(dim=(1, 3)), "fp32"))
    codes.copy_(reference._round(tiles / scales[:, None, :, None]).view(codes.shape))


def _destination(n: int, k: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(n, k, dtype=reference.FP8_DTYPE, device="cuda")
    return codes, torch.empty(blocks(n), blocks(k), device="cuda")


def fused(report: Report) -> None:
    for m in (*cases.DECODE_TOKENS, *cases.PREFILL_TOKENS):
        if report.late(f"fused kernels m={m}"):
            return
        _fused_norm(report, m, 4096)
        for activation in ACTIVATIONS:
            _fused_gate(report, activation, m, 12288)


def _fused_norm(report: Report, m: int, k: int) -> None:
    sets = [
        (cases.activations(m, k, "cuda"), cases.activations(m, k, "cuda", 3))
        for _ in range(min(64, bench.copies(m * k * 7)))
    ]
    scaling = torch.ones(k, device="cuda").bfloat16()

    def separate(x: Tensor, residual: Tensor) -> object:
        total = x + residual
        return total, quantize_activation(torch.nn.functional.rms_norm(total, (k,), scaling, 1e-6), "fp32")

    calls: Calls = {
        "blockfp8": lambda i: rmsnorm_quantize(*sets[i], scaling, 1e-6, "fp32"),
        "separate": lambda i: separate(*sets[i]),
    }
    moved = dict.fromkeys(calls, m * (k * 7 + blocks(k) * 4))
    timings = bench.measure(calls, dict.fromkeys(calls, len(sets)))
    exact = {"blockfp8": rmsnorm("fp32", min(m, 64), k)[0]}
    report.add("rmsnorm_quantize", [k], m, timings, moved, baseline="separate", exact=exact)


def _fused_gate(report: Report, activation: Activation, m: int, k: int) -> None:
    sets = [cases.activations(m, 2 * k, "cuda") / 8 for _ in range(min(64, bench.copies(m * k * 5)))]

    def separate(x: Tensor) -> object:
        gate, up = x[:, :k], x[:, k:]
        if activation == "silu":
            return quantize_activation(torch.nn.functional.silu(gate) * up, "fp32")
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return quantize_activation(torch.nn.functional.gelu(gate, approximate=approximate) * up, "fp32")

    calls: Calls = {
        "blockfp8": lambda i: gated_quantize(sets[i], activation, "fp32"),
        "separate": lambda i: separate(sets[i]),
    }
    moved = dict.fromkeys(calls, m * (k * 5 + blocks(k) * 4))
    timings = bench.measure(calls, dict.fromkeys(calls, len(sets)))
    exact = {"blockfp8": gated(activation, "fp32", min(m, 64), k)[0]}
    report.add(f"{activation}_mul_quantize", [k], m, timings, moved, baseline="separate", exact=exact)


if __name__ == "__main__":
    sys.exit(main())
