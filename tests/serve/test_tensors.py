# SPDX-License-Identifier: Apache-2.0
"""Tensors in memory as parts of bodies, against the safetensors library."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from vllm_fp8ext.serve import safetensors_body
from vllm_fp8ext.serve.safetensors_body import bodies
from vllm_fp8ext.serve.tensors import DTYPES, HostPart, tensor_parts

TORCH = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
NUMPY = [name for name in DTYPES if hasattr(np, name) or name == "bool"]


def through(tensor: Any, name: str = "a") -> torch.Tensor:
    """What the safetensors library reads from the body of one tensor."""
    [body] = bodies(tensor_parts([(name, tensor)], list(DTYPES)), 1 << 20)
    content = b"".join(body)
    assert len(content) == body.length
    assert b"".join(body.fetched()) == content
    return load(content)[name]


@pytest.mark.parametrize("name", TORCH)
def test_every_dtype_of_torch(name: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % 2 if name == "bool" else torch.arange(48, dtype=torch.uint8)
    tensor = raw.view(TORCH[name]).reshape(2, -1)
    result = through(tensor)
    assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("name", NUMPY)
def test_every_dtype_of_numpy(name: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(name)
    assert np.array_equal(through(array).numpy(), array)


@given(st.lists(st.integers(0, 4), max_size=4), st.permutations(range(4)), st.booleans())
def test_any_layout_in_memory(shape: list[int], order: list[int], of_torch: bool) -> None:
    axes = [axis for axis in order if axis < len(shape)]
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape).transpose(axes)
    if array.ndim and array.shape[0]:
        array = array[::2]
    expected = torch.tensor(array.tolist(), dtype=torch.float32).reshape(array.shape)
    assert torch.equal(through(torch.from_numpy(array) if of_torch else array), expected)


def test_arrays_backwards_or_of_the_other_byte_order() -> None:
    array = np.arange(5, dtype=np.float32)
    assert through(array[::-1]).tolist() == [4, 3, 2, 1, 0]
    assert through(array.astype(">f4")).tolist() == [0, 1, 2, 3, 4]


def test_bfloat16_as_numpy_extensions_have_it() -> None:
    """Only the name of its dtype is looked at."""

    class Brain(np.ndarray):
        @property
        def dtype(self) -> Any:
            return type("dtype", (), {"name": "bfloat16", "itemsize": 2, "isnative": True})

        @dtype.setter
        def dtype(self, dtype: Any) -> None:
            """`view` sets it."""
            np.ndarray.dtype.__set__(self, dtype)

    values = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    array = values.view(torch.int16).numpy().view(Brain)
    assert torch.equal(through(array), values)


def test_what_needs_a_gradient_can_be_sent() -> None:
    assert through(torch.nn.Parameter(torch.ones(3))).tolist() == [1, 1, 1]


def test_a_tensor_is_not_copied_before_it_is_fetched_and_not_where_it_need_not_be() -> None:
    tensor = torch.zeros(3)
    [part] = tensor_parts([("a", tensor)], ["float32"])
    tensor.fill_(1.0)
    fetched = part.fetched()
    assert isinstance(fetched, HostPart)
    assert b"".join(fetched.pieces()) == np.ones(3, np.float32).tobytes()
    tensor.fill_(2.0)
    assert b"".join(fetched.pieces()) == np.full(3, 2, np.float32).tobytes()


def test_it_comes_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_body, "PIECE", 100)
    [part] = tensor_parts([("a", torch.arange(250, dtype=torch.uint8))], ["uint8"])
    assert [len(piece) for piece in part.pieces()] == [100, 100, 50]


def test_the_name_that_safetensors_reserves() -> None:
    with pytest.raises(ValueError, match="expected a tensor's name, found __metadata__"):
        list(tensor_parts([("__metadata__", torch.ones(1))], list(DTYPES)))
