# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of sampled tokens: our kernel, vLLM's, and a softmax of torch."""

import torch

from vllm_fp8ext.bench.report import Calls, Report
from vllm_fp8ext.kernels.sampling.token_logprobs import token_logprobs
from vllm_fp8ext.kernels.testing import kernel_timing

VOCABULARY = 151936
"""Tokens that Qwen3 knows."""
ROWS = (8, 32, 128, 256)
BOUND = 1e-5
"""Largest difference from a softmax in float64."""


def logprobs(report: Report) -> None:
    """Time one token a row, as trainers ask for them."""
    for rows in ROWS:
        if report.late(f"token_logprobs m={rows}"):
            return
        of(report, rows)


def of(report: Report, rows: int) -> None:
    """Time one step of so many requests."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    noise = torch.Generator("cuda").manual_seed(rows)
    count = kernel_timing.copies(rows * VOCABULARY * 2)
    shape = (count, rows, VOCABULARY)
    logits = torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=noise)
    tokens = torch.randint(VOCABULARY, (rows, 1), device="cuda", generator=noise)
    calls: Calls = {
        "blockfp8": lambda i: token_logprobs(logits[i], tokens),
        "vllm": lambda i: compute_token_logprobs(logits[i], tokens),
        "torch": lambda i: logits[i].log_softmax(-1, dtype=torch.float32).gather(-1, tokens),
    }
    expected = logits[0].double().log_softmax(-1).gather(-1, tokens)
    exact = {"blockfp8": bool((token_logprobs(logits[0], tokens) - expected).abs().max() <= BOUND)}
    timings = kernel_timing.measure(calls, dict.fromkeys(calls, count))
    moved = dict.fromkeys(calls, rows * VOCABULARY * 2)
    report.add("token_logprobs", (VOCABULARY,), rows, timings, moved, baseline="vllm", exact=exact)
