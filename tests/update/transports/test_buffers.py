# SPDX-License-Identifier: Apache-2.0
"""Tensors side by side."""

import torch

from vllm_fp8ext.update.transports.buffers import Buffers

CPU = torch.device("cpu")


def held(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_tensors_lie_side_by_side_as_long_as_there_is_room() -> None:
    buffers = Buffers(4096)
    made = [
        buffers.empty((3, 5), torch.float32, CPU),
        buffers.empty((0, 7), torch.bfloat16, CPU),
        buffers.empty((100,), torch.float8_e4m3fn, CPU),
        buffers.empty((1, 2, 256), torch.uint8, CPU),
        buffers.empty((5000,), torch.uint8, CPU),  # too large for any buffer
        buffers.empty((3000,), torch.uint8, CPU),
        buffers.empty((513,), torch.uint8, CPU),  # too large for what is left, and to leave that empty
        buffers.empty((), torch.float64, CPU),  # does not fit any more, but is small
    ]
    shapes = [(3, 5), (0, 7), (100,), (1, 2, 256), (5000,), (3000,), (513,), ()]
    assert [tuple(tensor.shape) for tensor in made] == shapes
    assert all(tensor.is_contiguous() for tensor in made)
    raw = [tensor.reshape(-1).view(torch.uint8) for tensor in made]
    for number, part in enumerate(raw):
        part.fill_(number)
    assert [set(part.tolist()) for part in raw] == [{0}, set(), {2}, {3}, {4}, {5}, {6}, {7}]
    addresses = [held(tensor) for tensor in made]
    assert [addresses.index(address) for address in addresses] == [0, 0, 0, 0, 4, 0, 6, 7]
    assert all((tensor.data_ptr() - held(tensor)) % 256 == 0 for tensor in made if tensor.numel())


def test_each_device_has_a_buffer_of_its_own() -> None:
    buffers = Buffers(4096)
    here, _, there = (
        buffers.empty((4,), torch.float32, torch.device(name)) for name in ("cpu", "meta", "cpu")
    )
    assert held(here) == held(there)


def test_without_a_size_each_is_by_itself() -> None:
    buffers = Buffers(0)
    made = [buffers.empty((4,), torch.float32, CPU) for _ in range(3)]
    assert len({held(tensor) for tensor in made}) == len(made)
