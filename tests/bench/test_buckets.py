# SPDX-License-Identifier: Apache-2.0
"""Tensors of a trainer that has few buffers."""

import torch

from vllm_fp8ext.bench.buckets import in_buckets


def test_tensors_lie_in_few_buffers_as_they_were() -> None:
    given = {
        "a": torch.arange(100, dtype=torch.bfloat16).view(4, 25),
        "b": torch.arange(7, dtype=torch.float32),
        "large": torch.arange(1000, dtype=torch.float32),
        "c": torch.arange(64, dtype=torch.float32).view(8, 8),
        "d": torch.arange(65, dtype=torch.float32),
    }
    found = dict(in_buckets(given.items(), 512))
    assert list(found) == list(given)
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor)
        assert (found[name].dtype, found[name].is_contiguous()) == (tensor.dtype, True)
    buffers = {name: tensor.untyped_storage().data_ptr() for name, tensor in found.items()}
    assert buffers["a"] == buffers["b"]
    assert len(set(buffers.values())) == 4, "c fills half of one, d more than the other half"
    assert all((found[name].data_ptr() - buffers[name]) % 256 == 0 for name in found)
