# SPDX-License-Identifier: Apache-2.0
"""Up to how many tokens `decode_gemm` is ahead of kernels for large M on this GPU, by shape of the weights.

    python benchmarks/crossover.py --models Qwen3-8B --table kernels/gemm/crossover.json

Activations are quantized by a launch before, as in a layer, `decode_gemm` has the tile config that is the fastest alone
(`kernel_sweep.py`), results are checked, and the weights are more than the L2 cache holds. The table keeps what it has of
other shapes, and is written after each. DeepGEMM's kernels are compiled first, in several processes.
"""

import argparse
import concurrent.futures
import multiprocessing
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.bench.measured import Measured
from vllm_fp8ext.bench.operands import Operands
from vllm_fp8ext.bench.projections import MODELS, projections
from vllm_fp8ext.kernels.gemm import decode_gemm, decode_gemm_configs
from vllm_fp8ext.kernels.gemm.decode_gemm_configs import TileConfig
from vllm_fp8ext.kernels.gemm.registry import GEMM_KERNELS, GemmKernel
from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.testing import kernel_cases, kernel_timing
from vllm_fp8ext.layers.gemm_kernels import CUTLASS, DEEP_GEMM, LARGE_M

TOKENS = (8, 16, 32, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="tensor-parallel sizes")
    parser.add_argument("--seconds", type=float, default=600, help="begin no shape after so long")
    parser.add_argument(
        "--gemms",
        nargs="+",
        choices=[kernel.name for kernel in LARGE_M],
        default=[DEEP_GEMM.name, CUTLASS.name],
        help="kernels for large M",
    )
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    parser.add_argument("--table", type=Path, required=True, help="put what is found into this file")
    options = parser.parse_args()
    start = time.monotonic()
    chosen = [(n, k) for n, k in projections(options.models, options.tp) if n % 64 == 0 and k % 128 == 0]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, spawn) as pool:
        list(pool.map(_compile, chosen))
    print(f"{len(chosen)} shapes, kernels are compiled after {time.monotonic() - start:.0f} s", flush=True)
    table = Measured(options.table, ("n", "k"))
    for n, k in chosen:
        if time.monotonic() - start > options.seconds:
            print(f"no time left for {n}x{k}")
            continue
        times = _times(n, k, options.gemms)
        table.put({"n": n, "k": k, "us": times})
        print(f"{n}x{k}: {times}", flush=True)


def _compile(shape: tuple[int, int]) -> None:
    n, k = shape
    codes = torch.zeros(n, k, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.ones(-(-n // 128), -(-k // 128), device="cuda")
    for m in TOKENS:
        x = quantize_activation(kernel_cases.activations(m, k, "cuda"), "fp32")
        DEEP_GEMM.run(x, codes, scales, torch.bfloat16)
    torch.cuda.synchronize()


def _times(n: int, k: int, gemms: Sequence[str]) -> dict[str, dict[str, float]]:
    """Microseconds, in turn, by tokens and kernel."""
    operands = Operands(n, k)
    times: dict[str, dict[str, float]] = {}
    for m in TOKENS:
        if not decode_gemm_configs.usable(m, n, k):
            break
        x = kernel_cases.activations(m, k, "cuda")
        config = decode_gemm_configs.fastest_alone(n, k, decode_gemm_configs.width(m), quantized=True)
        calls: dict[str, Any] = {
            "decode_gemm": partial(_ours, operands, x, config),
        }
        for name in gemms:
            if GEMM_KERNELS[name].takes(n, k, "bfloat16"):
                calls[name] = partial(_other, GEMM_KERNELS[name], operands, x)
        for name, call in calls.items():
            error = operands.error(x, call(0))
            if not error < 1:
                raise SystemExit(f"{name} with {m} tokens of {n}x{k}: {error:.2f} of its bound")
        timings = kernel_timing.measure(calls, dict.fromkeys(calls, len(operands.codes)))
        for name, timing in timings.items():
            if timing.error:
                raise SystemExit(f"{name} with {m} tokens of {n}x{k}: {timing.error}")
        times[str(m)] = {name: round(timings[name].us, 2) for name in calls}
    return times


def _ours(operands: Operands, x: Tensor, config: TileConfig, index: int) -> Tensor:
    quantized = quantize_activation(x, "fp32")
    return decode_gemm.decode_gemm(quantized, operands.codes[index], operands.scales, None, "fp32", config)


def _other(kernel: GemmKernel, operands: Operands, x: Tensor, index: int) -> Tensor:
    quantized = quantize_activation(x, "fp32")
    return kernel.run(quantized, operands.codes[index], operands.scales, torch.bfloat16)


if __name__ == "__main__":
    main()
