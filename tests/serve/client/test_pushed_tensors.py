# SPDX-License-Identifier: Apache-2.0
"""Pushing tensors: what is taken, and what is refused by its name."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_fp8ext.serve.client.source import Pushable

from .conftest import Caller
from .pushes import (
    Sharded,
    same,
)
from .server import Server

VALUES = {
    "half": torch.arange(12, dtype=torch.float16).reshape(3, 4),
    "brain": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "one": torch.tensor(3.5),
    "none": torch.empty(0, 4),
}
IGNORED = {"ids": torch.arange(3)}


def mapping() -> Pushable:
    return VALUES | IGNORED


def parameters() -> Pushable:
    """As `named_parameters` gives them, where that is possible."""
    return (
        (name, torch.nn.Parameter(value) if value.is_floating_point() else value)
        for name, value in (VALUES | IGNORED).items()
    )


def arrays() -> Pushable:
    """Of numpy, but for the one dtype that it has not."""
    result = VALUES | IGNORED
    return {name: value if value.dtype == torch.bfloat16 else value.numpy() for name, value in result.items()}


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("chunk_bytes", [1, 30, 1 << 20])
@pytest.mark.parametrize("make", [mapping, parameters, arrays])
def test_tensors_arrive_as_they_are(
    caller: Caller, server: Server, make: Any, chunk_bytes: int, checksum: bool
) -> None:
    done = caller(server.url, "push", make(), chunk_bytes=chunk_bytes, checksum=checksum)
    assert done.state == "committed"
    assert same(server.served, VALUES)
    digests = ["content-digest" in headers for headers in server.headers if "content-length" in headers]
    assert digests.count(True) == (len(done.chunks) if checksum else 0)


def test_bfloat16_of_ml_dtypes(caller: Caller, server: Server) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)
    caller(server.url, "push", {"a": array})
    assert same(server.served, {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)})


@pytest.mark.parametrize("counted", [True, False])
def test_the_total_is_known_where_it_can_be(caller: Caller, server: Server, counted: bool) -> None:
    seen: list[tuple[int, int | None]] = []
    tensors = {f"a{n}": torch.full((90,), float(n)) for n in range(3)}
    caller(
        server.url,
        "push",
        tensors if counted else iter(tensors.items()),
        chunk_bytes=360,
        progress=lambda *progress: seen.append(progress),
    )
    sent = sum(len(body) for body in server.bodies if b"data_offsets" in body)
    assert {total for _, total in seen} == {sent if counted else None}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == sent


def test_an_iterable_is_taken_as_it_is_sent(caller: Caller, server: Server) -> None:
    """When tensor n is asked for, all but the chunk that is being filled and those under way have arrived."""
    seen: list[int] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for n in range(5):
            seen.append(len(next(iter(server.chunks.values()), {})))
            yield f"a{n}", torch.full((10,), float(n))

    caller(server.url, "push", gathered(), chunk_bytes=40, chunks_in_flight=1)
    assert seen == [0, 0, 1, 2, 3]
    assert len(server.served) == 5


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.float64), "expected dtype bfloat16 or float16 or float32, found float64"),
        (torch.zeros(2, dtype=torch.int64), "expected dtype bfloat16 .* found int64"),
        (np.zeros(2), "expected dtype .* found float64"),
        (np.zeros(2, dtype=np.complex64), "expected dtype .* found complex64"),
        (np.array(["x"]), "expected dtype .* found str"),
        (torch.zeros(2, device="meta"), "found one on the meta device"),
        (torch.zeros(2).to_sparse(), "found layout torch.sparse_coo"),
        (torch.zeros(2).as_subclass(Sharded), r"found a DTensor: send its full_tensor\(\)"),
        ([1.0, 2.0], "expected a torch tensor or a numpy array, found list"),
    ],
)
@pytest.mark.parametrize("mapped", [True, False])
def test_what_cannot_be_sent_is_named(
    caller: Caller, server: Server, tensor: Any, message: str, mapped: bool
) -> None:
    """Of a mapping before an update is opened, of an iterable before its chunk is sent."""
    tensors = {"good": torch.ones(2), "bad": tensor}
    with pytest.raises(ValueError, match=f"tensor bad: .*{message}"):
        caller(server.url, "push", tensors if mapped else iter(tensors.items()), chunk_bytes=8)
    assert server.served == {}
    if mapped:
        assert server.calls == ["GET /weights/manifest"]
    else:
        assert server.states == ["abandoned"]


@pytest.mark.parametrize("mapped", [True, False])
def test_what_the_server_ignores_is_not_sent_whatever_it_is(
    caller: Caller, server: Server, mapped: bool
) -> None:
    tensors = {"ids": torch.zeros(2, dtype=torch.complex64), "a": torch.ones(2)}
    caller(server.url, "push", tensors if mapped else iter(tensors.items()))
    assert same(server.served, {"a": torch.ones(2)})
    assert not any(b'"ids"' in body for body in server.bodies)


@pytest.mark.parametrize("pairs", [[("a", torch.ones(1)), ("a", torch.ones(1))]])
def test_a_name_that_comes_twice(caller: Caller, server: Server, pairs: Any) -> None:
    with pytest.raises(ValueError, match="tensor a: expected once, found twice"):
        caller(server.url, "push", pairs)
    assert server.states == ["abandoned"]
    assert server.calls[-1].startswith("DELETE")


@pytest.mark.parametrize("wrong", [[torch.ones(1)], torch.nn.Linear(1, 1), [("a",)], [(1, 2)]])
def test_what_are_no_pairs(caller: Caller, server: Server, wrong: Any) -> None:
    given = wrong.parameters() if isinstance(wrong, torch.nn.Module) else wrong
    with pytest.raises(ValueError, match="expected pairs of a name and a tensor"):
        caller(server.url, "push", given)
