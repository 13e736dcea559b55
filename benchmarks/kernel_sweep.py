# SPDX-License-Identifier: Apache-2.0
"""The best cut of the decode GEMM for each shape on this GPU.

    python benchmarks/kernel_sweep.py --out sweep.json --seconds 100

Prints and writes as it goes. A launch that never ends is named: its line is there without a time, and the process ends.
"""

import argparse
import concurrent.futures
import faulthandler
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vllm_fp8ext.bench.operands import Operands
from vllm_fp8ext.bench.provenance import provenance
from vllm_fp8ext.kernels import bench, cases, decode_gemm
from vllm_fp8ext.kernels.decode_gemm import Config
from vllm_fp8ext.kernels.reference import blocks

TOKENS = (8, 16, 32, 64, 128)
CUTS = 7
"""Cuts of rows and splits tried for each shape: those of the lowest predicted cost."""
SHALLOW_BYTES = 113 * 1024
"""Shared memory with which two blocks, of one kernel or of two, fit on a multiprocessor."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=100, help="stop after so long")
    options = parser.parse_args()
    start = time.perf_counter()
    faulthandler.dump_traceback_later(options.seconds + 20, exit=True)
    work = [
        (m, name, shape, cut)
        for m in TOKENS
        for name, shape in cases.LINEAR.items()
        for cut in _cuts(*shape, m)
    ]
    kernels = sorted({(cut.rows, cut.splits, m, "fp32") for m, _, _, cut in work})
    # before CUDA starts: forked processes have torch already, and NVRTC needs no GPU
    with concurrent.futures.ProcessPoolExecutor(16, multiprocessing.get_context("fork")) as pool:
        codes = list(pool.map(_compile, kernels))
    compiled = dict(zip(kernels, codes, strict=True))
    decode_gemm.machine_code = lambda *kernel: compiled[kernel]
    print(f"{len(kernels)} kernels compiled, {time.perf_counter() - start:.1f} s", flush=True)
    bandwidth = bench.copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, {time.perf_counter() - start:.1f} s", flush=True)
    found: list[dict[str, Any]] = []
    operands = {name: Operands(*shape) for name, shape in cases.LINEAR.items()}
    for m in TOKENS:
        for name in cases.LINEAR:
            if time.perf_counter() - start > options.seconds:
                print(f"no time left for {name} m={m}", flush=True)
                continue
            cuts = [cut for tokens, other, _, cut in work if (tokens, other) == (m, name)]
            found += _sweep(name, operands[name], m, cuts, bandwidth)
            if options.out:
                result = {"provenance": provenance(), "copy": bandwidth, "cases": found}
                options.out.write_text(json.dumps(result) + "\n")
    print("failures:", sorted({case["error"] for case in found if case["error"]})[:8])
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if all(case.get("bound", 0) < 1 for case in found) else 1


def _compile(kernel: tuple[Any, ...]) -> bytes:
    return decode_gemm.machine_code(*kernel)


def _cuts(n: int, k: int, m: int) -> list[Config]:
    """Sensible cuts."""
    every = [
        Config(rows=rows, splits=splits)
        for rows in (64, 128, 192, 256)
        for splits in decode_gemm.SPLITS
        if splits <= blocks(k) // 2 and Config(rows=rows, splits=splits).fits(m, k)
    ]
    return sorted(every, key=lambda cut: decode_gemm.cost(cut, n, k, m))[:CUTS]


def _variants(cut: Config, k: int, tokens: int) -> list[Config]:
    """One cut with a deep ring and with one that leaves room for a second block, early and not."""
    depths = [cut.ring(tokens, k)]
    for stages in range(depths[0], 2, -1):
        if Config(rows=cut.rows, splits=cut.splits, stages=stages).shared_bytes(tokens, k) <= SHALLOW_BYTES:
            depths.append(stages)
            break
    return [
        Config(rows=cut.rows, splits=cut.splits, stages=stages, early=early)
        for stages in dict.fromkeys(depths)
        for early in (False, True)
    ]


def _sweep(
    name: str, operands: Operands, m: int, cuts: list[Config], bandwidth: float
) -> list[dict[str, Any]]:
    x = cases.activations(m, operands.k, "cuda")
    base = bench.measure(
        {"bf16": lambda i: torch.nn.functional.linear(x, operands.weights[i])},
        {"bf16": len(operands.weights)},
        5,
    )["bf16"].us
    floor = operands.fp8_bytes(m) / bandwidth * 1e6
    print(f"{name} m={m} bf16 {base:.2f} us, at copy bandwidth {floor:.2f} us", flush=True)
    found = []
    for cut in cuts:
        predicted = decode_gemm.cost(cut, operands.n, operands.k, m) / 1e3
        for config in _variants(cut, operands.k, m):
            print(f"    {config.rows:3} x {config.splits:2}, {config.stages:2} deep, ", end="", flush=True)
            case = {"name": name, "shape": [operands.n, operands.k], "m": m, "config": vars(config)}
            case |= {"bf16_us": base} | _time(operands, x, config)
            found.append(case)
            if case["error"]:
                print(case["error"], flush=True)
                continue
            us = case["us"]
            print(
                f"{'early' if config.early else 'alone'} {us:7.2f} us {base / us:5.2f}x {floor / us:6.1%} "
                f"predicted {predicted:.1f} bound {case['bound']:.3f}",
                flush=True,
            )
    return found


def _time(operands: Operands, x: torch.Tensor, config: Config) -> dict[str, Any]:
    def run(index: int) -> torch.Tensor:
        return decode_gemm.decode_gemm(x, operands.codes[index], operands.scales, None, "fp32", config)

    try:
        bound = operands.error(x, run(0))
    except Exception as error:
        return {"error": str(error)[:200]}
    timing = bench.measure({"ours": run}, {"ours": len(operands.codes)}, 3)["ours"]
    return {"us": timing.us, "bound": bound, "error": timing.error if bound < 1 else f"wrong: {bound}"}


if __name__ == "__main__":
    sys.exit(main())
