# SPDX-License-Identifier: Apache-2.0
"""Tensors of a trainer that has few buffers."""

from typing import Any

import pytest
import torch
from torch import nn

from vllm_fp8ext.serve.client import flatten
from vllm_fp8ext.serve.client.flat import in_buffers


def test_tensors_lie_in_few_buffers_as_they_were() -> None:
    given = {
        "a": torch.arange(100, dtype=torch.bfloat16).view(4, 25),
        "b": torch.arange(7, dtype=torch.float32),
        "large": torch.arange(1000, dtype=torch.float32),
        "c": torch.arange(64, dtype=torch.float32).view(8, 8),
        "d": torch.arange(65, dtype=torch.float32),
    }
    tensors = dict(in_buffers(given.items(), 512))
    assert list(tensors) == list(given)
    for name, tensor in given.items():
        assert torch.equal(tensors[name], tensor)
        assert (tensors[name].dtype, tensors[name].is_contiguous()) == (tensor.dtype, True)
    buffers = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    assert buffers["a"] == buffers["b"]
    assert len(set(buffers.values())) == 4, "behind a and b is no room"
    assert all((tensors[name].data_ptr() - buffers[name]) % 256 == 0 for name in tensors)


class Model(nn.Module):
    """A linear layer whose weight the head shares, another layout, and something without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.head = nn.Linear(8, 4, bias=False)
        self.head.weight = nn.Parameter(self.linear.weight.data)
        self.transposed = nn.Parameter(torch.randn(6, 5).T)
        self.empty = nn.Parameter(torch.empty(0, 3))


def test_parameters_move_into_few_buffers_and_stay_what_they_are() -> None:
    model = Model()
    before = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    flatten(model, 4096)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(torch.equal(after[name], values[name]) for name in values)
    assert model.transposed.is_contiguous()
    held = [parameter for parameter in after.values() if parameter.numel()]
    assert len({parameter.untyped_storage().data_ptr() for parameter in held}) == 1
    assert model.head.weight.data_ptr() == model.linear.weight.data_ptr()
    (model.head(torch.ones(1, 8)).sum() + model.linear(torch.ones(1, 8)).sum()).backward()
    optimizer.step()
    assert not torch.equal(model.linear.weight, values["linear.weight"]), "it is trained where it is"
    assert torch.equal(model.linear.weight, model.head.weight)
    flatten(model, 4096)  # as often as one likes


def overlapping(model: Any) -> None:
    model.part = nn.Parameter(model.linear.weight.data[1:])


def parts(model: Any) -> None:
    """As flat optimizers hold parameters."""
    flat = torch.zeros(16)
    model.part, model.other = nn.Parameter(flat[:8]), nn.Parameter(flat[8:])


def sparse(model: Any) -> None:
    model.part = nn.Parameter(torch.eye(3).to_sparse())


def nowhere(model: Any) -> None:
    model.part = nn.Parameter(torch.ones(2, device="meta"))


def given_back(model: Any) -> None:
    """As sharding and offloading leave parameters; two of one shape look as if they shared their memory."""
    model.part, model.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for parameter in (model.part, model.other):
        parameter.data.untyped_storage().resize_(0)


def wrapped(model: Any) -> None:
    class Sharded(torch.Tensor):
        pass

    model.part = nn.Parameter(torch.ones(2).as_subclass(Sharded))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (overlapping, r"two parameters overlap in memory: .*\[4, 8\].* and .*\[3, 8\]"),
        (parts, r"2 parameters \(other, part, …\) lie in one buffer, which an optimizer may hold"),
        (sparse, "parameter part: expected a plain tensor, found Tensor torch.sparse_coo on cpu"),
        (wrapped, "parameter part: expected a plain tensor, found Sharded torch.strided on cpu"),
        (nowhere, "parameter part: expected a plain tensor, found Tensor torch.strided on meta"),
        (given_back, "parameter part: expected 8 bytes of memory, found 0"),
    ],
)
def test_what_can_not_be_moved_moves_nothing(spoil: Any, told: str) -> None:
    model = Model()
    spoil(model)
    places = [parameter.data_ptr() for parameter in model.linear.parameters()]
    with pytest.raises(ValueError, match=told):
        flatten(model)
    assert [parameter.data_ptr() for parameter in model.linear.parameters()] == places
