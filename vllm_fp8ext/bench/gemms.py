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
from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation
from vllm_fp8ext.kernels.testing import kernel_cases, kernel_timing

PREFILL_RIVALS = ("cutlass", "deep_gemm", "flashinfer")


def decode(report: Report, tokens: Sequence[int], names: Sequence[str]) -> None:
    """Few tokens. `blockfp8` is the layer as it is served, which quantizes inside (`blockfp8_inside`) or in a launch of its
    own (`blockfp8_apart`), or goes to DeepGEMM after that; `blockfp8_codes` is it where a norm, an activation function or
    attention has quantized: the faster, as measured, of `decode_gemm_codes` and `deep_gemm_codes`. `blockfp8_alone` may not
    start before the previous kernel has ended; `blockfp8_triton` is the portable kernel."""
    _compare(report, "decode_gemm", tokens, rivals(names), _decode)


def prefill(report: Report, tokens: Sequence[int], names: Sequence[str]) -> None:
    """Many tokens: `blockfp8` is a launch that quantizes, and DeepGEMM; `blockfp8_codes` is DeepGEMM alone."""
    report.measure_matmul()
    others = rivals([name for name in names if name in PREFILL_RIVALS])
    _compare(report, "prefill_gemm", tokens, others, _prefill)


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


def _decode(operands: Operands, x: Tensor) -> Calls:
    from vllm_fp8ext.layers.gemm import deep_gemm

    codes, scales, quantized = operands.codes, operands.scales, quantize_activation(x, "fp32")
    tokens = decode_gemm_configs.width(x.shape[0])
    config = decode_gemm_configs.choose(operands.n, operands.k, tokens, quantized=False)
    alone = dataclasses.replace(config, early=False)
    apart = decode_gemm_configs.fastest_alone(operands.n, operands.k, tokens, quantized=True)
    crossover = selection.crossover(operands.n, operands.k, "deep_gemm")
    portable = decode_gemm_triton.TritonTileConfig(splits=max(1, min(8, 132 // -(-operands.n // 128))))
    return {
        "blockfp8": lambda i: torch.ops.fp8ext.linear(
            x, codes[i], scales, None, "fp32", crossover, "deep_gemm"
        ),
        "blockfp8_codes": lambda i: torch.ops.fp8ext.quantized_linear(
            *quantized, codes[i], scales, None, crossover, "deep_gemm"
        ),
        "blockfp8_inside": lambda i: decode_gemm.decode_gemm(x, codes[i], scales, None, "fp32"),
        "decode_gemm_codes": lambda i: decode_gemm.decode_gemm(quantized, codes[i], scales, None, "fp32"),
        "blockfp8_apart": lambda i: decode_gemm.decode_gemm(
            quantize_activation(x, "fp32"), codes[i], scales, None, "fp32", apart
        ),
        "blockfp8_alone": lambda i: decode_gemm.decode_gemm(x, codes[i], scales, None, "fp32", alone),
        "deep_gemm_codes": lambda i: deep_gemm(quantized, codes[i], scales, torch.bfloat16),
        "blockfp8_triton": lambda i: decode_gemm_triton.decode_gemm_triton(
            x, codes[i], scales, None, "fp32", portable
        ),
    }


def _prefill(operands: Operands, x: Tensor) -> Calls:
    from vllm_fp8ext.layers.gemm import deep_gemm

    codes, scales, quantized = operands.codes, operands.scales, quantize_activation(x, "fp32")
    return {
        "blockfp8": lambda i: deep_gemm(quantize_activation(x, "fp32"), codes[i], scales, torch.bfloat16),
        "blockfp8_codes": lambda i: deep_gemm(quantized, codes[i], scales, torch.bfloat16),
    }


def _ready(report: Report, operands: Operands, others: Mapping[str, Gemm | str]) -> dict[str, list[Call]]:
    """Each rival's calls, one for each copy of the weights."""
    found = {}
    for name, gemm in others.items():
        if isinstance(gemm, str):
            continue
        try:
            # one that lays weights out anew gets copies of its own
            found[name] = [
                gemm(codes.clone(), operands.scales.clone())
                if name in UNQUANTIZED
                else gemm(codes, operands.scales)
                for codes in operands.codes
            ]
        except Exception as error:
            report.say(f"{name}: {type(error).__name__}: {error}"[:200])
    return found


def _within(operands: Operands, name: str, x: Tensor, call: Callable[[int], object]) -> bool:
    """Whether the first tokens' results are within their bound."""
    few = min(x.shape[0], 64)
    try:
        out = call(0)
    except Exception:  # comes again when it is timed, where it is recorded
        return False
    assert isinstance(out, Tensor)
    if name in UNQUANTIZED:
        return operands.difference(x[:few], out[:few]) < 2.0**-8
    return operands.error(x[:few], out[:few]) < 1
