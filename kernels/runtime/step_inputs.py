# SPDX-License-Identifier: Apache-2.0
"""Writes the inputs of a decode step, for model and attention, in one launch.

In such a step each request has one new token.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.runtime.launch import TritonLauncher

BLOCK = 1024
"""Values that a program moves at once."""


class Requests(NamedTuple):
    """State of every request, at its place of `S`."""

    computed_S: Tensor
    """int32, tokens that have keys and values."""
    sampled_S: Tensor
    """int64, the last token that was sampled: `[S]` or `[S, 1]`."""
    tables_SP: Tensor
    """int32, pages of the KV cache, rows contiguous."""
    pages_S: Tensor
    """int32, how many of them there are."""


class Inputs(NamedTuple):
    """Inputs of a step of up to `R` requests and `T` tokens."""

    tokens_T: Tensor
    """int32."""
    positions_T: Tensor
    """int64, of the tokens in their contexts."""
    starts_R1: Tensor
    """int32, R + 1: where each request's tokens begin, and where the last one's end."""
    lengths_R: Tensor
    """int32, of contexts with their new tokens; 0 where there is no request."""
    tables_RP: Tensor
    """int32, pages of the KV cache, as wide as those of all requests."""
    slots_T: Tensor
    """int64, places in the KV cache; -1 where there is no token."""


@triton.jit(do_not_specialize=["count", "tails"])
def _step_inputs(
    places,
    computed,
    sampled,
    tables,
    pages,
    out_tokens,
    out_positions,
    out_starts,
    out_lengths,
    out_tables,
    out_slots,
    count,
    tails,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    REQUESTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, one request, or behind those `BLOCK` of what lies behind the last. `count` requests; as many programs as
    `tails` are not for one."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    rows = tl.num_programs(0) - tails
    lanes = tl.arange(0, BLOCK)
    if row >= rows:
        at = (row - rows) * BLOCK + lanes
        tl.store(out_starts + at, tl.minimum(at, count), mask=at <= REQUESTS)
        tl.store(out_lengths + at, 0, mask=(at >= count) & (at < REQUESTS))
        tl.store(out_slots + at, -1, mask=(at >= count) & (at < TOKENS))
        return
    out_row = out_tables + row.to(tl.int64) * WIDTH
    if row >= count:
        for first in range(0, WIDTH, BLOCK):
            tl.store(out_row + first + lanes, 0, mask=first + lanes < WIDTH)
        return
    place = tl.load(places + row)
    position = tl.load(computed + place)
    table = tables + place * WIDTH
    tl.store(out_tokens + row, tl.load(sampled + place))
    tl.store(out_positions + row, position)
    tl.store(out_lengths + row, position + 1)
    tl.store(out_slots + row, tl.load(table + position // PAGE).to(tl.int64) * PAGE + position % PAGE)
    used = tl.load(pages + place)
    for first in range(0, used, BLOCK):
        inside = first + lanes < used
        tl.store(out_row + first + lanes, tl.load(table + first + lanes, mask=inside), mask=inside)


_launch = TritonLauncher(_step_inputs)


def step_inputs(
    places_R: Tensor, requests: Requests, inputs: Inputs, count: int, padded: int, page: int
) -> None:
    """Write the inputs of `count` requests, and of rows up to `padded` without one.

    The requests' places are the first of `places_R` (int64). `page`: tokens of a page. Of tables, what lies behind a
    request's pages is left as it was."""
    most, tokens = inputs.lengths_R.shape[0], inputs.slots_T.shape[0]
    tails = -(-max(most + 1, tokens) // BLOCK)
    _launch(
        (padded + tails, 1, 1),
        (places_R, *requests, *inputs),
        (),
        (count, tails),
        (requests.tables_SP.shape[1], page, most, tokens, places_R.is_cuda, BLOCK),
        4,
    )
