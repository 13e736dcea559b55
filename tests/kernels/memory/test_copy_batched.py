# SPDX-License-Identifier: Apache-2.0
"""Many tensors copied in one launch."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.memory import copy_batched
from vllm_fp8ext.kernels.memory.copy_batched import CopyBatched

SIZES = (1, 64, 8192, 8193, 3 * 8192 + 5)


def sources(device: str, dtype: torch.dtype) -> list[Tensor]:
    noise = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=noise).to(device, dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_element_comes_to_its_place_and_no_other_changes(device: str, dtype: torch.dtype) -> None:
    rooms = [torch.full((size + 16,), 7.0, dtype=dtype, device=device) for size in SIZES]
    places = [room[:size] for room, size in zip(rooms, SIZES, strict=True)]
    assert all(copy_batched.takes(place) for place in places)
    together = CopyBatched(places)
    for values in (sources(device, dtype), [-value for value in sources(device, dtype)]):
        wrong = together.queue(torch.tensor([value.data_ptr() for value in values]))
        assert not wrong.any()
        for value, place, room in zip(values, places, rooms, strict=True):
            assert torch.equal(place, value)
            assert (room[place.numel() :] == 7.0).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_told_of_its_own_tensor(device: str, odd: float) -> None:
    values = sources(device, torch.bfloat16)
    values[4][0] = values[4][-1] = odd
    together = CopyBatched([torch.empty_like(value) for value in values])
    wrong = together.queue(torch.tensor([value.data_ptr() for value in values]))
    assert wrong.tolist() == [0.0, 0.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize(
    "place",
    [torch.zeros(0), torch.zeros(4, 4).T, torch.zeros(20)[1:], torch.zeros(4, dtype=torch.int32)],
    ids=["empty", "not contiguous", "address", "dtype"],
)
def test_what_can_not_go_with_others(place: Tensor) -> None:
    assert not copy_batched.takes(place)
