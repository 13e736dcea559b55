# SPDX-License-Identifier: Apache-2.0
"""The best cut of the decode GEMM for each shape on this GPU.

    python benchmarks/kernel_sweep.py --out sweep.json --seconds 100

Prints and writes as it goes. A launch that never ends is named: its line is there without a time, and the process ends.
"""

import argparse
import concurrent.futures
import dataclasses
import faulthandler
import itertools
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
from vllm_fp8ext.kernels.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.reference import blocks

TOKENS = (8, 16, 32, 64)
SHAPES = {
    **cases.LINEAR,
    "1.7B gate_up": (12288, 2048),
    "1.7B down": (2048, 6144),
    "1.7B qkv": (4096, 2048),
    "1.7B o": (2048, 2048),
    "32B gate_up": (51200, 5120),
    "32B down": (5120, 25600),
    "32B qkv": (10240, 5120),
    "32B o": (5120, 8192),
}
FEWEST_BLOCKS, MOST_WAVES = 48, 12
"""Cuts into fewer blocks, or into more for each multiprocessor, are not tried."""
KINDS = ("BF16", "codes")
SHALLOW_BYTES = 113 * 1024
"""Shared memory with which two blocks, of one kernel or of two, fit on a multiprocessor."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=100, help="stop after so long")
    parser.add_argument("--tokens", type=int, nargs="+", choices=decode_gemm.TOKENS, default=TOKENS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of activations")
    options = parser.parse_args()
    start = time.perf_counter()
    faulthandler.dump_traceback_later(options.seconds + 20, exit=True)
    work = [
        (m, name, kind, cut)
        for m in options.tokens
        for name in options.shapes
        for kind in options.kinds
        for cut in _cuts(*SHAPES[name], m, kind)
    ]
    kernels = sorted(
        {(cut.rows, cut.splits, m, "fp32", kind == "codes", cut.stream) for m, _, kind, cut in work}
    )
    # before CUDA starts: forked processes have torch already, and NVRTC needs no GPU
    with concurrent.futures.ProcessPoolExecutor(16, multiprocessing.get_context("fork")) as pool:
        codes = list(pool.map(_compile, kernels))
    compiled = dict(zip(kernels, codes, strict=True))
    decode_gemm.machine_code = lambda *kernel: compiled[kernel]
    print(f"{len(kernels)} kernels compiled, {time.perf_counter() - start:.1f} s", flush=True)
    bandwidth = bench.copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, {time.perf_counter() - start:.1f} s", flush=True)
    found: list[dict[str, Any]] = []
    for name in options.shapes:
        operands = Operands(*SHAPES[name])
        for m, kind in itertools.product(options.tokens, options.kinds):
            if time.perf_counter() - start > options.seconds:
                print(f"no time left for {name} m={m} {kind}", flush=True)
                continue
            cuts = [cut for *here, cut in work if here == [m, name, kind]]
            found += _sweep(name, operands, m, cuts, bandwidth, kind)
        if options.out:
            result = {"provenance": provenance(), "copy": bandwidth, "cases": found}
            options.out.write_text(json.dumps(result) + "\n")
    print("failures:", sorted({case["error"] for case in found if case["error"]})[:8])
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if all(case.get("bound", 0) < 1 for case in found) else 1


def _compile(kernel: tuple[Any, ...]) -> bytes:
    return decode_gemm.machine_code(*kernel)


def _cuts(n: int, k: int, m: int, kind: str) -> list[Config]:
    """Every cut that fits and makes a sensible number of blocks, with a deep ring and with one that leaves room for a second
    block."""
    found = []
    for rows, splits in itertools.product((64, 128, 192, 256), decode_gemm.SPLITS):
        grid = -(-n // rows) * splits
        if splits > blocks(k) // 2 or not FEWEST_BLOCKS <= grid <= MOST_WAVES * 132:
            continue
        for stream in (False, True) if kind == "codes" else (False,):
            cut = Config(rows=rows, splits=splits, stream=stream, early=True)
            if cut.fits(m, k):
                found += [dataclasses.replace(cut, stages=stages) for stages in _depths(cut, m, k)]
    return found


def _depths(cut: Config, m: int, k: int) -> list[int]:
    deep = cut.ring(m, k)
    shallow = [
        stages
        for stages in range(deep, 2, -1)
        if dataclasses.replace(cut, stages=stages).shared_bytes(m, k) <= SHALLOW_BYTES
    ]
    return list(dict.fromkeys([deep, *shallow[:1]]))


def _sweep(
    name: str, operands: Operands, m: int, cuts: list[Config], bandwidth: float, kind: str
) -> list[dict[str, Any]]:
    x = cases.activations(m, operands.k, "cuda")
    base = bench.measure(
        {"bf16": lambda i: torch.nn.functional.linear(x, operands.weights[i])},
        {"bf16": len(operands.weights)},
        5,
    )["bf16"].us
    floor = operands.fp8_bytes(m) / bandwidth * 1e6
    print(f"{name} m={m} {kind} bf16 {base:.2f} us, at copy bandwidth {floor:.2f} us", flush=True)
    found = []
    for config in cuts:
        streamed = "streamed" if config.stream else ""
        print(
            f"    {config.rows:3} x {config.splits:2}, {config.stages:2} deep {streamed} ", end="", flush=True
        )
        case = {"name": name, "shape": [operands.n, operands.k], "m": m, "kind": kind}
        case |= {"config": vars(config), "bf16_us": base} | _time(operands, x, config, kind)
        found.append(case)
        if case["error"]:
            print(case["error"], flush=True)
            continue
        us = case["us"]
        print(f"{us:7.2f} us {base / us:5.2f}x {floor / us:6.1%} bound {case['bound']:.3f}", flush=True)
    best = min((case for case in found if not case["error"]), key=lambda case: case["us"])
    print(
        f"best: {name} m={m} {kind} {best['us']:.2f} us {best['bf16_us'] / best['us']:.2f}x {best['config']}"
    )
    return found


def _time(operands: Operands, x: torch.Tensor, config: Config, kind: str) -> dict[str, Any]:
    values = quantize_activation(x, "fp32") if kind == "codes" else x

    def run(index: int) -> torch.Tensor:
        return decode_gemm.decode_gemm(values, operands.codes[index], operands.scales, None, "fp32", config)

    try:
        bound = operands.error(x, run(0))
    except Exception as error:
        return {"error": str(error)[:200]}
    timing = bench.measure({"ours": run}, {"ours": len(operands.codes)}, 3)["ours"]
    return {"us": timing.us, "bound": bound, "error": timing.error if bound < 1 else f"wrong: {bound}"}


if __name__ == "__main__":
    sys.exit(main())
