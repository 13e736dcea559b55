# SPDX-License-Identifier: Apache-2.0
"""Where the time of the decode GEMM goes: when its blocks pass each part of the kernel.

    python benchmarks/kernel_trace.py --tokens 1 16 64 [--shapes o qkv] [--codes]

Stamps are put into the source as text, so the kernel itself has none. Times are microseconds since the first block began: the
first, the median and the last block, and the median time that a block takes from the stamp before.
"""

import argparse
import ctypes
import sys

import torch
from torch import Tensor

from vllm_fp8ext.bench.operands import Operands
from vllm_fp8ext.kernels.gemm import decode_gemm, decode_gemm_configs
from vllm_fp8ext.kernels.gemm.decode_gemm_configs import TileConfig
from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.runtime import cuda_kernel, nvrtc
from vllm_fp8ext.kernels.testing import kernel_cases

STAMPS = ("begins", "may read x", "x is quantized", "x is there", "first weights", "last product", "stored")
LAUNCHES = 12
CLOCK_GHZ = 1.755
_FUNCTION = """
__device__ __forceinline__ void stamp(u64* trace, u32 index) {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
  if (threadIdx.x == 0) trace[(blockIdx.x * 8 + index) * 2] = now, trace[(blockIdx.x * 8 + index) * 2 + 1] = clock64();
}

// --- the kernel
"""
_PLACES = (
    ("// --- the kernel\n", _FUNCTION),
    ("                u32 stages) {", "                u32 stages, u64* trace) {"),
    ("  const Work work = work_of(n, k);\n", "  const Work work = work_of(n, k);\n  stamp(trace, 0);\n"),
    (
        '  asm volatile("griddepcontrol.wait;" ::: "memory");\n#if !CODES',
        '  asm volatile("griddepcontrol.wait;" ::: "memory");\n  stamp(trace, 1);\n#if !CODES',
    ),
    (
        "  fence_async();\n#endif\n#if SPLITS",
        "  fence_async();\n#endif\n  stamp(trace, 2);\n#if SPLITS",
    ),
    ("  sync_named(EVERYONE, THREADS);\n", "  sync_named(EVERYONE, THREADS);\n  stamp(trace, 3);\n"),
    (
        "      barrier_wait(at.full + stage * 8, phase);\n",
        "      barrier_wait(at.full + stage * 8, phase);\n      if (block + turn == 0) stamp(trace, 4);\n",
    ),
    (
        "#if SPLITS > 1\n    if (turn) barrier_wait_cluster",
        "    stamp(trace, 5);\n#if SPLITS > 1\n    if (turn) barrier_wait_cluster",
    ),
    (
        "#if SPLITS > 1\n    __syncwarp();\n    if (owned",
        "    stamp(trace, 6);\n#if SPLITS > 1\n    __syncwarp();\n    if (owned",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--shapes", nargs="+", choices=kernel_cases.LINEAR, default=list(kernel_cases.LINEAR))
    parser.add_argument("--codes", action="store_true", help="activations that come quantized")
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    options = parser.parse_args()
    if options.compile_only:
        print(len(machine_code(TileConfig(rows=128, splits=4), 64, options.codes)), "bytes")
        return 0
    for name in options.shapes:
        operands = Operands(*kernel_cases.LINEAR[name])
        for m in options.tokens:
            config = decode_gemm_configs.choose(
                operands.n, operands.k, decode_gemm_configs.width(m), quantized=options.codes
            )
            print(f"{name} {operands.n}x{operands.k} m={m} {config}", flush=True)
            _show(_trace(operands, m, config, options.codes))
    return 0


def source() -> str:
    """The kernel with its stamps."""
    text = decode_gemm._SOURCE.read_text()
    for place, stamped in _PLACES:
        assert text.count(place) == 1, place
        text = text.replace(place, stamped)
    return text


def machine_code(config: TileConfig, tokens: int, codes: bool) -> bytes:
    macros = {"ROWS": config.rows, "TOKENS": tokens, "SPLITS": config.splits, "POW2": 0, "CODES": int(codes)}
    macros["STREAM"] = int(config.stream)
    return nvrtc.compile_source(source(), {"wgmma.cuh": decode_gemm._wgmma(tokens)}, macros)


def _trace(operands: Operands, m: int, config: TileConfig, codes: bool) -> Tensor:
    """`[blocks, stamps, 2]` of the last of several launches: nanoseconds, and cycles of the block's multiprocessor."""
    tokens = decode_gemm_configs.width(m)
    kernel = cuda_kernel.Kernel(
        machine_code(config, tokens, codes), "decode_gemm", config.rows * 2 + 32, config.splits
    )
    shared = config.shared_bytes(tokens, operands.k)
    tiles = -(-operands.n // config.rows)
    grid = min(tiles, kernel.resident_blocks(shared) // config.splits) * config.splits
    x = kernel_cases.activations(m, operands.k, "cuda")
    values, scales = quantize_activation(x, "fp32") if codes else (x, None)
    out = torch.empty(m, operands.n, dtype=torch.bfloat16, device="cuda")
    trace = torch.zeros(grid, 8, 2, dtype=torch.int64, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for index in range(LAUNCHES):
        weight = operands.codes[index % len(operands.codes)]
        arguments = (
            decode_gemm._map(weight.data_ptr(), (operands.n, operands.k), weight.stride(0), config.rows),
            *decode_gemm._activations(values, scales, tokens),
            ctypes.c_void_p(operands.scales.data_ptr()),
            ctypes.c_void_p(None),
            ctypes.c_void_p(out.data_ptr()),
            *(ctypes.c_uint(size) for size in (m, operands.n, operands.k, config.ring(tokens, operands.k))),
            ctypes.c_void_p(trace.data_ptr()),
        )
        kernel.launch(grid, shared, stream, arguments, early=config.early)
    torch.cuda.synchronize()
    error = operands.error(x, out) if (LAUNCHES - 1) % len(operands.codes) == 0 else 0.0
    assert error < 1, error
    return trace.cpu()[:, : len(STAMPS)]


def _show(trace: Tensor) -> None:
    begin = trace[:, 0, 0].min()
    before = trace[:, 0, 1]
    for index, name in enumerate(STAMPS):
        when = (trace[:, index, 0] - begin).double() / 1e3
        step = (trace[:, index, 1] - before).double() / (CLOCK_GHZ * 1e3)
        before = trace[:, index, 1]
        print(
            f"  {name:16} {when.min():7.2f} {when.median():7.2f} {when.max():7.2f}   +{step.median():6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
