# SPDX-License-Identifier: Apache-2.0
"""Computes log-probabilities of chosen tokens.

Each logit is read once, a row by several programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.runtime.launch import TritonLauncher

SLICE = 8192
"""Logits of a program."""
WIDTH = 32
"""Chosen tokens that are answered at a time."""


@triton.jit
def _slice_sums(
    logits_TV,
    tops_TS,
    sums_TS,
    stride,
    V,
    SLICE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program, a slice of a row: its largest logit, and the sum of exponentials below that."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    x = tl.load(logits_TV + row * stride + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    # a slice that is masked as a whole adds nothing
    sums = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), axis=0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops_TS + place, top)
    tl.store(sums_TS + place, sums)


@triton.jit(do_not_specialize=["C", "stride_C"])
def _chosen(
    logits_TV,
    tokens_TC,
    tops_TS,
    sums_TS,
    out_TC,
    stride,
    stride_C,
    C,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program, a row: adds up its slices, and answers its tokens."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slices = tl.arange(0, PADDED)
    tops = tl.load(tops_TS + row * SLICES + slices, mask=slices < SLICES, other=float("-inf"))
    sums = tl.load(sums_TS + row * SLICES + slices, mask=slices < SLICES, other=0.0)
    top = tl.max(tops, axis=0)
    log_sum = tl.log(tl.sum(sums * tl.exp(tops - tl.where(top == float("-inf"), 0.0, top)), axis=0))
    for start in range(0, C, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        inside = columns < C
        tokens = tl.load(tokens_TC + row * stride_C + columns, mask=inside, other=0)
        x = tl.load(logits_TV + row * stride + tokens, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_TC + row * C + columns, x - top - log_sum, mask=inside)


_launch_sums = TritonLauncher(_slice_sums)
_launch_chosen = TritonLauncher(_chosen)


def token_logprobs(logits_TV: Tensor, tokens_TC: Tensor) -> Tensor:
    """Compute `log_softmax(logits)` of some tokens of each row.

    A row's sum does not depend on other rows. NaN and a row without a finite logit give NaN.

    Args:
        logits_TV: `[T, V]` in BF16, FP16 or FP32, its rows of any distance.
        tokens_TC: `[T, C]` ids below V, int32 or int64, its rows of any distance.

    Returns:
        `[T, C]` in FP32.
    """
    (rows, v), count = logits_TV.shape, tokens_TC.shape[1]
    out = torch.empty(rows, count, dtype=torch.float32, device=logits_TV.device)
    if not rows or not count:
        return out
    slices = -(-v // SLICE)
    tops, sums = torch.empty(2, rows, slices, dtype=torch.float32, device=logits_TV.device)
    early, stride = logits_TV.is_cuda, logits_TV.stride(0)
    _launch_sums((rows, slices, 1), (logits_TV, tops, sums), (stride, v), (), (SLICE, early), 8)
    _launch_chosen(
        (rows, 1, 1),
        (logits_TV, tokens_TC, tops, sums, out),
        (stride,),
        (tokens_TC.stride(0), count),
        (slices, triton.next_power_of_2(slices), WIDTH, early),
        1,
    )
    return out
