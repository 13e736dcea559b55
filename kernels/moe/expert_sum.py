# SPDX-License-Identifier: Apache-2.0
"""Adds up the weighted results of each token's experts, in fp32 and in their order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.triton_numerics import rounded
from vllm_fp8ext.kernels.runtime.launch import TritonLauncher

WIDTH = 1024
"""Columns of a program."""


def expert_sum_reference(
    parts_RK: Tensor,
    places_MT: Tensor | None,
    weights_MT: Tensor,
    experts_MT: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Compute what the kernel does, but for fused multiply-adds."""
    m, t = experts_MT.shape
    total = torch.zeros(m, parts_RK.shape[1], dtype=torch.float32, device=parts_RK.device)
    places = torch.arange(m * t, device=parts_RK.device) if places_MT is None else places_MT
    for choice, rows in enumerate(places.view(m, t).T.long()):
        here = experts_MT[:, choice] >= 0
        part = parts_RK[rows.clamp_min(0)].float() * weights_MT[:, choice, None].float()
        total += torch.where(here[:, None], part, 0.0)
    return total.to(dtype)


@triton.jit
def _expert_sum(
    parts_RK,
    places_MT,
    weights_MT,
    experts_MT,
    out_MK,
    K,
    CHOSEN: tl.constexpr,
    PLACED: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program, `WIDTH` columns of one token."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < K
    total = tl.zeros((WIDTH,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        slot = token * CHOSEN + choice
        here = tl.load(experts_MT + slot) >= 0
        row = slot
        if PLACED:
            row = tl.load(places_MT + slot).to(tl.int64)
        part = tl.load(parts_RK + row * K + columns, mask=inside & here, other=0.0).to(tl.float32)
        total += part * tl.load(weights_MT + slot).to(tl.float32)
    total = rounded(total, out_MK.dtype.element_ty, HARDWARE)
    tl.store(out_MK + token * K + columns, total.to(out_MK.dtype.element_ty), mask=inside)


_launch = TritonLauncher(_expert_sum)


def expert_sum(
    parts_RK: Tensor,
    places_MT: Tensor | None,
    weights_MT: Tensor,
    experts_MT: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """`[M, K]` in `dtype`: the sum of each token's rows of `parts_RK` (contiguous), each times its weight, experts that are
    negative left out. `places_MT`: which row belongs to a token's choice; None: row `m * T + t`."""
    (m, t), k = experts_MT.shape, parts_RK.shape[1]
    out = torch.empty(m, k, dtype=dtype, device=parts_RK.device)
    early = parts_RK.is_cuda
    if m:
        places = experts_MT if places_MT is None else places_MT
        _launch(
            (m, -(-k // WIDTH), 1),
            (parts_RK, places, weights_MT, experts_MT, out),
            (k,),
            (),
            (t, places_MT is not None, early, early, WIDTH),
            4,
        )
    return out
