# SPDX-License-Identifier: Apache-2.0
"""Contents of many tensors exchanged at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.swap import TILE_BYTES, Swap


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()


@given(
    st.lists(st.one_of(st.integers(0, 70), st.integers(TILE_BYTES - 20, TILE_BYTES * 2 + 40)), max_size=5),
    st.integers(0, 99),
    st.sampled_from((0, 32, 7)),
)
@settings(max_examples=40, deadline=None)
def test_everything_is_exchanged_and_nothing_beside_it(
    device: str, sizes: list[int], seed: int, begin: int
) -> None:
    noise = torch.Generator().manual_seed(seed)

    def side() -> list[Tensor]:
        """Each in the middle of a larger one."""
        return [
            torch.randint(0, 256, (size + 64,), generator=noise, dtype=torch.uint8).to(device)
            for size in sizes
        ]

    first, second = side(), side()
    before = [[bytes_of(tensor) for tensor in tensors] for tensors in (first, second)]
    pairs = [
        (a[begin : begin + size], b[32 : 32 + size]) for a, b, size in zip(first, second, sizes, strict=True)
    ]
    swap = Swap(pairs)
    swap.run()
    for a, b, was_a, was_b, size in zip(first, second, *before, sizes, strict=True):
        assert bytes_of(a) == was_a[:begin] + was_b[32 : 32 + size] + was_a[begin + size :]
        assert bytes_of(b) == was_b[:32] + was_a[begin : begin + size] + was_b[32 + size :]
    swap.run()
    assert [[bytes_of(tensor) for tensor in tensors] for tensors in (first, second)] == before


def test_sizes_are_equal(device: str) -> None:
    whole = torch.zeros(64, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="found 32 and 16 bytes"):
        Swap([(whole[:32], whole[48:])])
