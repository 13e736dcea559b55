# SPDX-License-Identifier: Apache-2.0
"""Sums of blocks, added up tensor by tensor."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.numerics.block_sums import totals


def test_each_part_is_added_up(device: str) -> None:
    noise = torch.Generator().manual_seed(0)
    shapes = [(1, 3), (2, 5, 3), (300, 1, 3), (17, 40, 3), (256, 3)]
    parts = [torch.rand(shape, generator=noise).to(device) for shape in shapes]
    counts = totals(parts)
    assert (counts.shape, counts.dtype) == ((5, 3), torch.float64)
    for row, part in zip(counts, parts, strict=True):
        torch.testing.assert_close(row, part.double().reshape(-1, 3).sum(0), rtol=1e-12, atol=0)


def test_what_is_not_finite_stays_in_its_part(device: str) -> None:
    parts = [torch.ones(4, 3), torch.full((300, 3), torch.nan), torch.ones(2, 3)]
    counts = totals([part.to(device) for part in parts])
    assert counts[0].tolist() == [4, 4, 4]
    assert counts[1].isnan().all()
    assert counts[2].tolist() == [2, 2, 2]
