# SPDX-License-Identifier: Apache-2.0
"""Kernels of the FP8 KV cache, in the shape of Qwen3-8B: rescaling cached K and V, and amaxes of K, V and Q."""

from functools import partial

import torch
from torch import Tensor

from vllm_fp8ext.bench import correct
from vllm_fp8ext.bench.report import Calls, Report
from vllm_fp8ext.kernels.attention.kv_amax import AmaxTally, kv_amax_reference
from vllm_fp8ext.kernels.attention.rescale_kv import CachedLayer
from vllm_fp8ext.kernels.attention.rescale_kv_triton import Rescaling
from vllm_fp8ext.kernels.testing import kernel_cases, kernel_timing

BLOCKS, HELD = 40_000, 12_000
"""Blocks of the cache, and those that requests hold."""
TOKENS = (128, 8192)


def kv(report: Report) -> None:
    """Both."""
    if not report.late("kv_rescale"):
        rescale(report)
    for tokens in TOKENS:
        if report.late(f"kv_amax m={tokens}"):
            return
        amax(report, tokens)


def rescale(report: Report) -> None:
    """All layers, with a ratio for each head, back and forth. Rival: a `copy` of as many bytes."""
    memory = kernel_cases.kv_memory(kernel_cases.LAYERS, BLOCKS, "cuda")
    blocks = torch.randperm(BLOCKS, device="cuda")[:HELD].sort()[0]
    ratios = torch.linspace(1.5, 0.6, kernel_cases.KV_HEADS)
    both = [
        Rescaling([CachedLayer(*pair, step, step) for pair in kernel_cases.kv_views(memory)], blocks)
        for step in (ratios, 1 / ratios)
    ]
    codes = memory[:, 0].numel() * HELD
    words = memory.view(-1).view(torch.int64)
    source, target = words[: codes // 8], words[codes // 8 :][: codes // 8]
    calls: Calls = {"blockfp8": lambda i: both[i].run(), "copy": lambda _: target.copy_(source)}
    exact = {"blockfp8": correct.kv_rescale()[0]}  # of a smaller cache
    timings = kernel_timing.measure(calls, {"blockfp8": 2, "copy": 1})
    shape = (kernel_cases.LAYERS, HELD, kernel_cases.KV_BLOCK, kernel_cases.KV_HEADS, kernel_cases.HEAD_DIM)
    moved = dict.fromkeys(calls, 2 * codes)
    report.add("kv_rescale", shape, None, timings, moved, baseline="copy", exact=exact)


def amax(report: Report, tokens: int) -> None:
    """One layer's K, V and quantized Q. Rival: the reference's `separate` launches."""
    heads, width, q_width = (
        kernel_cases.KV_HEADS,
        kernel_cases.HEAD_DIM,
        kernel_cases.Q_HEADS // kernel_cases.KV_HEADS * kernel_cases.HEAD_DIM,
    )
    scales = tuple(torch.full((), 0.01, device="cuda") for _ in range(3))
    slots = torch.arange(tokens, device="cuda")
    size = tokens * heads * (4 * width + q_width)
    sets = [kernel_cases.kv_step(tokens, "cuda", seed) for seed in range(min(64, kernel_timing.copies(size)))]
    tally = AmaxTally(heads, torch.device("cuda"))
    calls: Calls = {
        "blockfp8": lambda i: tally.add(sets[i], slots, scales),
        "separate": partial(_separate, sets, scales),
    }
    tally.add(sets[0], slots, scales)
    exact = {"blockfp8": correct.tallied(tally, sets[0], scales)[0]}
    timings = kernel_timing.measure(calls, dict.fromkeys(calls, len(sets)))
    moved = dict.fromkeys(calls, size)
    report.add("kv_amax", (heads, width), tokens, timings, moved, baseline="separate", exact=exact)


def _separate(
    sets: list[tuple[Tensor, Tensor, Tensor]], scales: tuple[Tensor, Tensor, Tensor], i: int
) -> None:
    for part, scale in zip(sets[i], scales, strict=True):
        kv_amax_reference(part, scale)
