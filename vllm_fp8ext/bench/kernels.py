# SPDX-License-Identifier: Apache-2.0
"""How fast the kernels are on this GPU, beside what else computes the same.

    fp8ext bench kernels --out kernels.json

Everything that is timed passes its bound in the same process first. Exit code 1 when a kernel of ours does not.
"""

import argparse
import math
import time
from collections.abc import Sequence

import torch

from vllm_fp8ext.bench.options import CommandLine
from vllm_fp8ext.bench.rivals import NAMES
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.testing import kernel_cases
from vllm_fp8ext.layers import gemm_kernels

PARTS = (
    *("decode", "prefill", "weights", "fused"),
    *("kv", "attention", "attention_layers", "logprobs", "experts"),
)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandLine("kernels", __doc__)
    parser.add_choice("--only", PARTS, PARTS, "these parts alone", metavar="PART")
    parser.add_choice("--rivals", NAMES, NAMES, "beside GEMMs of ours, where they run", nargs="*")
    names = [kernel.name for kernel in gemm_kernels.LARGE_M]
    parser.add_choice("--gemms", names, names[:1], "kernels for large M that are timed alone", nargs="*")
    for part, tokens in (
        ("prefill", kernel_cases.PREFILL_TOKENS),
        ("decode", kernel_cases.DECODE_TOKENS),
        ("expert", kernel_cases.EXPERT_TOKENS),
    ):
        parser.add_argument(
            f"--{part}-tokens",
            metavar="M",
            type=int,
            nargs="*",
            default=tokens,
            help=f"rows of the {part} cases",
        )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so long")
    parser.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="NAME",
        help="compare each kernel (whose check has NAME in it) with the reference instead",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says; the exit code.

    Raises:
        ConfigError: no GPU.
    """
    options = _options(arguments)
    if not torch.cuda.is_available():
        raise ConfigError("bench kernels: expected a CUDA GPU, found none")
    from vllm_fp8ext.bench import correct, gemms, kv_kernels, quantizers
    from vllm_fp8ext.bench.report import Report

    if options.check is not None:
        return correct.check(options.check)
    start = time.perf_counter()
    report = Report(options.out, stop=start + options.seconds)
    if "decode" in options.only:
        gemms.decode(report, options.decode_tokens, options.rivals, options.gemms)
    if "prefill" in options.only:
        gemms.prefill(report, options.prefill_tokens, options.rivals, options.gemms)
    if "weights" in options.only:
        quantizers.weights(report)
    if "fused" in options.only:
        quantizers.fused(report)
    if "kv" in options.only:
        kv_kernels.kv(report)
    if "attention" in options.only:
        from vllm_fp8ext.bench import attention

        attention.attention(report)
    if "attention_layers" in options.only:
        from vllm_fp8ext.bench import attention

        attention.layers(report)
    if "logprobs" in options.only:
        from vllm_fp8ext.bench import logprobs

        logprobs.logprobs(report)
    if "experts" in options.only:
        from vllm_fp8ext.bench import experts

        with torch.inference_mode():
            experts.experts(report, options.expert_tokens)
    for kernel in ("decode_gemm", "prefill_gemm"):
        for variant in ("blockfp8", "blockfp8_codes"):
            report.summarize(kernel, variant)
    report.say(f"{time.perf_counter() - start:.0f} s")
    return 0 if report.exact else 1
