# SPDX-License-Identifier: Apache-2.0
"""GEMMs against each other, over weights that the L2 cache does not hold."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from vllm_fp8ext.bench.operands import Operands
from vllm_fp8ext.bench.report import Calls, Report
from vllm_fp8ext.bench.rivals import UNQUANTIZED, Call, Gemm, rivals
from vllm_fp8ext.kernels.gemm import decode_gemm, decode_gemm_configs, decode_gemm_triton, selection
from vllm_fp8ext.kernels.gemm.registry import GEMM_KERNELS, GemmKernel
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.testing import kernel_cases, kernel_timing
from vllm_fp8ext.layers import gemm_kernels

PREFILL_RIVALS = ("cutlass", "deep_gemm", "flashinfer")


def decode(report: Report, tokens: Sequence[int], names: Sequence[str], gemms: Sequence[str]) -> None:
    """Time small M.

    `blockfp8` is the layer as it is served, which quantizes inside (`blockfp8_inside`) or in a launch of its own
    (`blockfp8_apart`), or goes to the fastest kernel for large M after that. `blockfp8_codes` is it where a norm, an
    activation function or attention has quantized. `decode_gemm_codes`, and `NAME_codes` for each of `gemms`, are one kernel
    each with quantized activations. `blockfp8_alone` may not start before the previous kernel has ended; `blockfp8_triton`
    is the portable kernel. `names`: rivals.
    """
    _compare(report, "decode_gemm", tokens, rivals(names), partial(_decode, gemms=gemms))


def prefill(report: Report, tokens: Sequence[int], names: Sequence[str], gemms: Sequence[str]) -> None:
    """Time large M.

    `blockfp8` is a launch that quantizes, and the fastest kernel for large M; `blockfp8_codes` is that kernel alone, and
    `NAME_codes` another one of `gemms`. `names`: rivals.
    """
    report.measure_matmul()
    others = rivals([name for name in names if name in PREFILL_RIVALS])
    _compare(report, "prefill_gemm", tokens, others, partial(_prefill, gemms=gemms))


def _compare(
    report: Report,
    kernel: str,
    tokens: Sequence[int],
    others: Mapping[str, Gemm | str],
    ours: Callable[[Operands, Tensor], Calls],
) -> None:
    report.say(
        "rivals: "
        + ", ".join(f"{name} ({g if isinstance(g, str) else 'runs'})" for name, g in others.items())
    )
    for n, k in kernel_cases.LINEAR.values():
        operands = Operands(n, k)
        ready = _ready(report, operands, others)
        for m in tokens:
            if report.late(f"{kernel} {n}x{k} m={m}"):
                return
            x = kernel_cases.activations(m, k, "cuda")
            calls: Calls = {"bf16": partial(_bf16, operands, x), **ours(operands, x)}
            calls |= {name: partial(_copy, copies, x) for name, copies in ready.items()}
            passes = dict.fromkeys(calls, len(operands.codes)) | {"bf16": len(operands.weights)}
            moved = dict.fromkeys(calls, operands.fp8_bytes(m)) | {"bf16": operands.bf16_bytes(m)}
            exact = {name: name == "bf16" or _within(operands, name, x, call) for name, call in calls.items()}
            timings = kernel_timing.measure(calls, passes)
            report.add(kernel, (n, k), m, timings, moved, exact=exact, operations=2 * m * n * k)


def _bf16(operands: Operands, x: Tensor, index: int) -> Tensor:
    return torch.nn.functional.linear(x, operands.weights[index])


def _copy(copies: list[Call], x: Tensor, index: int) -> Tensor:
    return copies[index](x)


def _decode(operands: Operands, x: Tensor, gemms: Sequence[str]) -> Calls:
    codes, scales, quantized = operands.codes, operands.scales, quantize_activation(x, "fp32")
    tokens = decode_gemm_configs.width(x.shape[0])
    config = decode_gemm_configs.choose(operands.n, operands.k, tokens, quantized=False)
    alone = dataclasses.replace(config, early=False)
    apart = decode_gemm_configs.fastest_alone(operands.n, operands.k, tokens, quantized=True)
    gemm = gemm_kernels.LARGE_M[0].name
    crossover = selection.crossover(operands.n, operands.k, gemm)
    portable = decode_gemm_triton.TritonTileConfig(splits=max(1, min(8, 132 // -(-operands.n // 128))))
    return {
        "blockfp8": lambda i: torch.ops.fp8ext.linear(x, codes[i], scales, None, "fp32", crossover, gemm),
        "blockfp8_codes": lambda i: torch.ops.fp8ext.quantized_linear(
            *quantized, codes[i], scales, None, crossover, gemm
        ),
        "blockfp8_inside": lambda i: decode_gemm.decode_gemm(x, codes[i], scales, None, "fp32"),
        "decode_gemm_codes": lambda i: decode_gemm.decode_gemm(quantized, codes[i], scales, None, "fp32"),
        "blockfp8_apart": lambda i: decode_gemm.decode_gemm(
            quantize_activation(x, "fp32"), codes[i], scales, None, "fp32", apart
        ),
        "blockfp8_alone": lambda i: decode_gemm.decode_gemm(x, codes[i], scales, None, "fp32", alone),
        **_registered(operands, quantized, gemms),
        "blockfp8_triton": lambda i: decode_gemm_triton.decode_gemm_triton(
            x, codes[i], scales, None, "fp32", portable
        ),
    }


def _prefill(operands: Operands, x: Tensor, gemms: Sequence[str]) -> Calls:
    codes, scales, quantized = operands.codes, operands.scales, quantize_activation(x, "fp32")
    run = gemm_kernels.LARGE_M[0].run
    return {
        "blockfp8": lambda i: run(quantize_activation(x, "fp32"), codes[i], scales, torch.bfloat16),
        "blockfp8_codes": lambda i: run(quantized, codes[i], scales, torch.bfloat16),
        **_registered(operands, quantized, [name for name in gemms if name != gemm_kernels.LARGE_M[0].name]),
    }


def _registered(operands: Operands, x: Quantized, gemms: Sequence[str]) -> Calls:
    """Registered kernels that take the shape, by name."""

    def call(kernel: GemmKernel, index: int) -> Tensor:
        return kernel.run(x, operands.codes[index], operands.scales, torch.bfloat16)

    kernels = [GEMM_KERNELS[name] for name in gemms]
    taking = [kernel for kernel in kernels if kernel.takes(operands.n, operands.k, "bfloat16")]
    return {f"{kernel.name}_codes": partial(call, kernel) for kernel in taking}


def _ready(report: Report, operands: Operands, others: Mapping[str, Gemm | str]) -> dict[str, list[Call]]:
    """Each rival's calls, one for each copy of the weights."""
    calls = {}
    for name, gemm in others.items():
        if isinstance(gemm, str):
            continue
        try:
            # one that lays weights out anew gets copies of its own
            calls[name] = [
                gemm(codes.clone(), operands.scales.clone())
                if name in UNQUANTIZED
                else gemm(codes, operands.scales)
                for codes in operands.codes
            ]
        except Exception as error:
            report.say(f"{name}: {type(error).__name__}: {error}"[:200])
    return calls


def _within(operands: Operands, name: str, x: Tensor, call: Callable[[int], object]) -> bool:
    """Check the first tokens' results against their bound."""
    checked = min(x.shape[0], 64)
    try:
        out = call(0)
    except Exception:  # comes again when it is timed, where it is recorded
        return False
    assert isinstance(out, Tensor)
    if name in UNQUANTIZED:
        return operands.difference(x[:checked], out[:checked]) < 2.0**-8
    return operands.error(x[:checked], out[:checked]) < 1
