# SPDX-License-Identifier: Apache-2.0
"""Contents of many tensors exchanged at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.memory.swap import TILE_BYTES, Swap


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()


@given(
    st.lists(st.one_of(st.integers(0, 70), st.integers(TILE_BYTES - 20, TILE_BYTES * 2 + 40)), max_size=5),
    st.integers(0, 99),
    st.sampled_from((0, 32, 7)),
)
@settings(max_examples=40)
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


SIZES = (40, TILE_BYTES * 2 + 56, 7, TILE_BYTES)


@pytest.fixture
def pairs(device: str) -> list[tuple[Tensor, Tensor]]:
    """Equal contents on both sides."""
    noise = torch.Generator().manual_seed(0)
    first = [torch.randint(0, 256, (size,), generator=noise, dtype=torch.uint8).to(device) for size in SIZES]
    return [(tensor, tensor.clone()) for tensor in first]


def test_equal_contents_have_equal_fingerprints(pairs: list[tuple[Tensor, Tensor]]) -> None:
    swap = Swap(pairs)
    assert swap.fingerprint(0) == swap.fingerprint(1) > 0
    pairs[0][0][0] ^= 1
    changed, other = swap.fingerprint(0), swap.fingerprint(1)
    assert changed != other
    swap.run()
    assert (swap.fingerprint(0), swap.fingerprint(1)) == (other, changed)


@pytest.mark.parametrize(
    ("tensor", "byte"), [(0, 0), (0, 39), (1, 5), (1, TILE_BYTES), (1, -1), (2, 3), (3, -9)]
)
def test_every_byte_counts(pairs: list[tuple[Tensor, Tensor]], tensor: int, byte: int) -> None:
    swap = Swap(pairs)
    for bit in (1, 128):
        pairs[tensor][0][byte] ^= bit
        assert swap.fingerprint(0) != swap.fingerprint(1)
        pairs[tensor][0][byte] ^= bit
    assert swap.fingerprint(0) == swap.fingerprint(1)


def test_places_count(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """The same words in another order, within a tile and across tiles."""
    swap = Swap(pairs)
    for here, there in ((0, 16), (32, TILE_BYTES + 32)):
        tensor, copy = pairs[1]
        tensor[here : here + 4], tensor[there : there + 4] = copy[there : there + 4], copy[here : here + 4]
        assert swap.fingerprint(0) != swap.fingerprint(1)
        tensor.copy_(copy)


def test_nothing_has_a_fingerprint_too(device: str) -> None:
    assert Swap([]).fingerprint(0) == 0
