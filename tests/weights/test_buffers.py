# SPDX-License-Identifier: Apache-2.0
"""Tensors side by side."""

import torch

from vllm_fp8ext.weights.buffers import Buffers

CPU = torch.device("cpu")


def test_tensors_lie_side_by_side_and_large_ones_by_themselves() -> None:
    buffers = Buffers(1024)
    made = [
        buffers.empty((3, 5), torch.float32, CPU),
        buffers.empty((0, 7), torch.bfloat16, CPU),
        buffers.empty((100,), torch.float8_e4m3fn, CPU),
        buffers.empty((1, 2, 256), torch.uint8, CPU),
        buffers.empty((3000,), torch.uint8, CPU),
        buffers.empty((), torch.float64, CPU),
    ]
    assert [tuple(tensor.shape) for tensor in made] == [(3, 5), (0, 7), (100,), (1, 2, 256), (3000,), ()]
    assert all(tensor.is_contiguous() for tensor in made)
    raw = [tensor.reshape(-1).view(torch.uint8) for tensor in made]
    for number, part in enumerate(raw):
        part.fill_(number)
    assert [set(part.tolist()) for part in raw] == [{0}, set(), {2}, {3}, {4}, {5}]
    held = [tensor.untyped_storage().data_ptr() for tensor in made if tensor.numel()]
    assert [held.index(address) for address in held] == [0, 0, 0, 3, 4]


def test_without_a_size_each_is_by_itself() -> None:
    buffers = Buffers(0)
    held = [buffers.empty((4,), torch.float32, CPU) for _ in range(3)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == len(held)
