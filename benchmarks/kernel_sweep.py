# SPDX-License-Identifier: Apache-2.0
"""The best tile config of the decode GEMM for each shape on this GPU.

    python benchmarks/kernel_sweep.py --models Qwen3-8B --table kernels/gemm/decode_gemm_configs.json

Prints and writes as it goes; --table keeps what the file has of other shapes. A launch that never ends is named: its line is
there without a time, and the process ends.
"""

import argparse
import concurrent.futures
import faulthandler
import itertools
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vllm_fp8ext.bench.measured import Measured
from vllm_fp8ext.bench.operands import Operands
from vllm_fp8ext.bench.projections import MODELS, projections
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.kernels.gemm import decode_gemm, decode_gemm_configs
from vllm_fp8ext.kernels.gemm.decode_gemm_configs import TileConfig
from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.testing import kernel_cases, kernel_timing

TOKENS = (8, 16, 32, 64)
FEWEST_BLOCKS, MOST_WAVES = 48, 12
"""Tile configs into fewer blocks, or into more for each multiprocessor, are not tried."""
KINDS = ("BF16", "codes")
KEY = ("n", "k", "tokens", "quantized")
"""What the table tells apart."""
KEPT = 8
"""Tile configs of a case that the table keeps."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=100, help="stop after so long")
    parser.add_argument("--tokens", type=int, nargs="+", choices=decode_gemm_configs.TOKENS, default=TOKENS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-8B"])
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="tensor-parallel sizes")
    parser.add_argument("--table", type=Path, help="put the best tile configs into this file")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of activations")
    options = parser.parse_args()
    start = time.perf_counter()
    faulthandler.dump_traceback_later(options.seconds + 20, exit=True)
    chosen = projections(options.models, options.tp)
    work = {
        (shape, m, kind): _tile_configs(*shape, m, kind)
        for shape, m, kind in itertools.product(chosen, options.tokens, options.kinds)
    }
    kernels = sorted(
        {
            (config.rows, config.splits, m, "fp32", kind == "codes", config.stream)
            for (_, m, kind), configs in work.items()
            for config in configs
        }
    )
    # before CUDA starts: forked processes have torch already, and NVRTC needs no GPU
    with concurrent.futures.ProcessPoolExecutor(16, multiprocessing.get_context("fork")) as pool:
        codes = list(pool.map(_compile, kernels))
    compiled = dict(zip(kernels, codes, strict=True))
    decode_gemm.machine_code = lambda *kernel: compiled[kernel]
    print(f"{len(kernels)} kernels compiled, {time.perf_counter() - start:.1f} s", flush=True)
    bandwidth = kernel_timing.copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, {time.perf_counter() - start:.1f} s", flush=True)
    table = Measured(options.table, KEY) if options.table else None
    cases: list[dict[str, Any]] = []
    for shape in chosen:
        operands, begin = Operands(*shape), len(cases)
        for m, kind in itertools.product(options.tokens, options.kinds):
            if time.perf_counter() - start > options.seconds:
                print(f"no time left for {shape} m={m} {kind}", flush=True)
                continue
            cases += _sweep(operands, m, work[shape, m, kind], bandwidth, kind)
        write_cases(options.out, provenance(), cases, copy=bandwidth)
        if table:
            _keep(table, cases[begin:])
    print("failures:", sorted({case["error"] for case in cases if case["error"]})[:8])
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if all(case.get("bound", 0) < 1 for case in cases) else 1


def _compile(kernel: tuple[Any, ...]) -> bytes:
    return decode_gemm.machine_code(*kernel)


def _keep(table: Measured, cases: list[dict[str, Any]]) -> None:
    """Put the fastest tile configs of each case into the table."""
    swept: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in cases:
        if not one["error"]:
            swept.setdefault((*one["shape"], one["m"], one["kind"] == "codes"), []).append(one)
    for which, ones in swept.items():
        fastest = sorted(ones, key=lambda one: one["us"])[:KEPT]
        case = dict(zip(KEY, which, strict=True)) | {"bf16_us": round(ones[0]["bf16_us"], 2)}
        case["configs"] = [
            [
                *decode_gemm_configs.config_key(TileConfig(**one["config"]), one["m"], which[1]),
                round(one["us"], 2),
            ]
            for one in fastest
        ]
        table.put(case)


def _tile_configs(n: int, k: int, m: int, kind: str) -> list[TileConfig]:
    """Those that make a sensible number of blocks."""
    return [
        config
        for config in decode_gemm_configs.tile_configs(n, k, m, quantized=kind == "codes")
        if FEWEST_BLOCKS <= -(-n // config.rows) * config.splits <= MOST_WAVES * 132
    ]


def _sweep(
    operands: Operands, m: int, configs: list[TileConfig], bandwidth: float, kind: str
) -> list[dict[str, Any]]:
    if not configs:
        return []
    x = kernel_cases.activations(m, operands.k, "cuda")
    base = kernel_timing.measure(
        {"bf16": lambda i: torch.nn.functional.linear(x, operands.weights[i])},
        {"bf16": len(operands.weights)},
        5,
    )["bf16"].us
    floor = operands.fp8_bytes(m) / bandwidth * 1e6
    name = f"{operands.n}x{operands.k}"
    print(f"{name} m={m} {kind} bf16 {base:.2f} us, at copy bandwidth {floor:.2f} us", flush=True)
    cases = []
    for config in configs:
        streamed = "streamed" if config.stream else ""
        print(
            f"    {config.rows:3} x {config.splits:2}, {config.stages:2} deep {streamed} ", end="", flush=True
        )
        case = {"shape": [operands.n, operands.k], "m": m, "kind": kind}
        case |= {"config": vars(config), "bf16_us": base} | _time(operands, x, config, kind)
        cases.append(case)
        if case["error"]:
            print(case["error"], flush=True)
            continue
        us = case["us"]
        print(f"{us:7.2f} us {base / us:5.2f}x {floor / us:6.1%} bound {case['bound']:.3f}", flush=True)
    best = min((case for case in cases if not case["error"]), key=lambda case: case["us"], default=None)
    if best:
        print(f"best: {name} m={m} {kind} {best['us']:.2f} us {base / best['us']:.2f}x {best['config']}")
    return cases


def _time(operands: Operands, x: torch.Tensor, config: TileConfig, kind: str) -> dict[str, Any]:
    values = quantize_activation(x, "fp32") if kind == "codes" else x

    def run(index: int) -> torch.Tensor:
        return decode_gemm.decode_gemm(values, operands.codes[index], operands.scales, None, "fp32", config)

    try:
        bound = operands.error(x, run(0))
    except Exception as error:
        return {"error": str(error)[:200]}
    timing = kernel_timing.measure({"ours": run}, {"ours": len(operands.codes)}, 3)["ours"]
    return {"us": timing.us, "bound": bound, "error": timing.error if bound < 1 else f"wrong: {bound}"}


if __name__ == "__main__":
    sys.exit(main())
