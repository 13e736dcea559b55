# SPDX-License-Identifier: Apache-2.0
"""Gathers the largest magnitudes of K, V and Q over many steps.

The scales of an FP8 KV cache are made of them.

Shape suffixes: T tokens, G KV heads, W columns that belong to a KV head (head_dim for K and V; head_dim times the query heads
of a KV head for Q), P programs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, FP8_MAX

K, V, Q = range(3)
PROGRAMS = 64
"""Programs for each head on a GPU, each with sums of its own: no atomics, and always the same result."""


@dataclass(frozen=True)
class AmaxCounts:
    """Largest magnitudes and counts of saturated elements, on the CPU; first index `K`, `V`, `Q`.

    `amax`: fp32 `[3, G]`; NaN and infinity stay visible. `saturated`: int64 `[3, G]`, elements whose magnitude was above
    448 times their scale, or NaN. `elements`: int64 `[3]`, elements of one head.
    """

    amax: Tensor
    saturated: Tensor
    elements: Tensor


class AmaxTally:
    """Counts of an attention layer of `heads` KV heads since they were last taken."""

    def __init__(self, heads: int, device: torch.device) -> None:
        programs = PROGRAMS if device.type == "cuda" else 1
        self._widths = [0, 0, 0]
        with torch.inference_mode(False):  # they are written in and outside of it
            self.amax_3GP = torch.zeros(3, heads, programs, dtype=torch.float32, device=device)
            self.saturated_3GP = torch.zeros(3, heads, programs, dtype=torch.int64, device=device)
            self.tokens_P = torch.zeros(programs, dtype=torch.int64, device=device)

    def add(
        self,
        values_TGW: tuple[Tensor, Tensor, Tensor],
        slots_T: Tensor,
        scales: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add a step; only queued on a GPU. Each triple is of K, V and Q.

        `values_TGW`: BF16, FP16 or fp32 with contiguous W; Q also E4M3 codes, which stand for themselves times Q's scale, and
        of which ±448 (it may have been more) counts as twice that, and as saturated. `slots_T`: tokens whose slot is negative
        are padding, as are those beyond its end. `scales`: fp32, one or `[G]`.
        """
        tokens = min(len(slots_T), len(values_TGW[0]))
        slots_T = slots_T[:tokens]
        self._widths = [values.shape[2] for values in values_TGW]
        if self.amax_3GP.is_cuda:
            from vllm_fp8ext.kernels.attention import kv_amax_triton

            kv_amax_triton.launch(self, values_TGW, slots_T, scales)
            return
        here = slots_T >= 0
        self.tokens_P += here.sum()
        for index, (values, scale) in enumerate(zip(values_TGW, scales, strict=True)):
            amax, saturated = kv_amax_reference(values[:tokens][here], scale)
            torch.maximum(self.amax_3GP[index, :, 0], amax, out=self.amax_3GP[index, :, 0])
            self.saturated_3GP[index, :, 0] += saturated

    def take(self) -> AmaxCounts:
        """Return the counts since the last call and begin anew; waits for the GPU."""
        elements = self.tokens_P.sum() * torch.tensor(self._widths, device=self.tokens_P.device)
        seen = AmaxCounts(self.amax_3GP.amax(2).cpu(), self.saturated_3GP.sum(2).cpu(), elements.cpu())
        for part in (self.amax_3GP, self.saturated_3GP, self.tokens_P):
            part.zero_()
        return seen


def kv_amax_reference(values_TGW: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of each head, fp32 `[G]`, and its saturated elements, int64 `[G]`.

    `values_TGW`: one of the tensors that `AmaxTally.add` takes.
    """
    heads = values_TGW.shape[1]
    sizes = values_TGW.float().abs()
    if not len(sizes):
        return sizes.new_zeros(heads), torch.zeros(heads, dtype=torch.int64, device=sizes.device)
    amax = sizes.amax(dim=(0, 2))
    if values_TGW.dtype == FP8_DTYPE:
        doubled = torch.where(amax == FP8_MAX, 2 * FP8_MAX, amax)
        return doubled * scale, (~(sizes < FP8_MAX)).sum(dim=(0, 2))
    limit = (scale * FP8_MAX).expand(heads)[:, None]
    return amax, (~(sizes <= limit)).sum(dim=(0, 2))
