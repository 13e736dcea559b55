# SPDX-License-Identifier: Apache-2.0
"""Tensors of an iterable are those that were yielded, whatever becomes of them when the next one is asked for."""

import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client.source import Pushable

from .conftest import Caller
from .server import Server, answer, drop

COUNT, SIZE = 12, 10
WANTED = {f"a{n}": torch.full((SIZE,), float(n)) for n in range(COUNT)}
SPOILED = -1.0
Pairs = Iterator[tuple[str, Any]]


def one_buffer() -> Pairs:
    """Each tensor is there until the next one is asked for."""
    buffer = torch.empty(SIZE)
    for name, tensor in WANTED.items():
        buffer.copy_(tensor)
        yield name, buffer
        buffer.fill_(SPOILED)


def one_array() -> Pairs:
    buffer = np.empty(SIZE, np.float32)
    for name, tensor in WANTED.items():
        buffer[:] = tensor.numpy()
        yield name, buffer
        buffer[:] = SPOILED


def one_turned_buffer() -> Pairs:
    """Whose elements do not lie one after the other."""
    buffer = torch.empty(SIZE, 2)
    for name, tensor in WANTED.items():
        buffer[:, 0].copy_(tensor)
        yield name, buffer[:, 0]
        buffer.fill_(SPOILED)


def changed_back() -> Pairs:
    """Adapters are merged, all tensors yielded, and the adapters taken out again: as TRL does."""
    model = {name: tensor - 1 for name, tensor in WANTED.items()}
    for tensor in model.values():
        tensor += 1
    yield from model.items()
    for tensor in model.values():
        tensor -= 1


def merged_one_by_one() -> Pairs:
    model = {name: tensor - 1 for name, tensor in WANTED.items()}
    for name, tensor in model.items():
        tensor += 1
        yield name, tensor
        tensor -= 1


class Made(UserDict[str, Tensor]):
    """A mapping whose tensors are made when they are asked for, all in one buffer."""

    def __init__(self) -> None:
        super().__init__(WANTED)
        self.buffer = torch.empty(SIZE)

    def __getitem__(self, name: str) -> Tensor:
        return self.buffer.copy_(super().__getitem__(name))


class MadeItems(dict[str, Tensor]):
    """The same, a `dict` by its class."""

    def items(self) -> Any:
        return one_buffer()


@pytest.mark.parametrize(
    ("chunk_bytes", "in_flight", "checksum"),
    [(1, 8, True), (100, 1, False), (100, 8, True), (1 << 20, 1, True), (1 << 20, 8, False)],
)
@pytest.mark.parametrize(
    "make",
    [
        one_buffer,
        one_array,
        one_turned_buffer,
        changed_back,
        merged_one_by_one,
        Made,
        lambda: MadeItems(WANTED),
    ],
)
def test_what_was_yielded_is_served(
    caller: Caller,
    server: Server,
    make: Callable[[], Pushable],
    chunk_bytes: int,
    in_flight: int,
    checksum: bool,
) -> None:
    options = {"chunk_bytes": chunk_bytes, "chunks_in_flight": in_flight, "checksum": checksum}
    caller(server.url, "push", make(), **options)
    assert {name: tensor.tolist() for name, tensor in server.served.items()} == {
        name: tensor.tolist() for name, tensor in WANTED.items()
    }


@pytest.mark.parametrize("make", [one_buffer, changed_back])
def test_several_servers_get_what_was_yielded(
    caller: Caller, start: Callable[..., Server], make: Callable[[], Pushable]
) -> None:
    """Also those that it has to be sent to again."""
    servers = [start() for _ in range(3)]
    servers[1].faults["PUT /updates/*/chunks/1"] = [drop(), drop(30)]
    caller([server.url for server in servers], "push", make(), chunk_bytes=100)
    for server in servers:
        assert all(torch.equal(server.served[name], tensor) for name, tensor in WANTED.items())


class Noted(np.ndarray[Any, Any]):
    """Tells which of its copies are still there."""

    copies: ClassVar[list[weakref.ref[Any]]] = []

    def copy(self, order: Any = "C") -> Any:
        result = np.array(self, order=order)
        self.copies.append(weakref.ref(result))
        return result


@pytest.mark.parametrize("in_flight", [1, 3])
def test_no_more_copies_are_held_than_chunks_are_under_way(
    caller: Caller, server: Server, in_flight: int
) -> None:
    held: list[int] = []

    def made() -> Pairs:
        array = np.ones(SIZE, np.float32).view(Noted)
        for n in range(16):
            held.append(sum(copy() is not None for copy in Noted.copies))
            yield f"a{n}", array

    each = 2
    Noted.copies.clear()
    caller(server.url, "push", made(), chunk_bytes=each * 4 * SIZE, chunks_in_flight=in_flight)
    assert len(Noted.copies) == 16
    assert 0 < max(held) <= in_flight * each


@pytest.mark.parametrize("several", [True, False])
def test_a_generator_ends_before_a_failed_push_does(caller: Caller, server: Server, several: bool) -> None:
    """So that what it has merged is taken out again, on the thread that it was advanced on."""
    ended: list[int] = []

    def merged() -> Pairs:
        begun = threading.get_ident()
        try:
            yield from one_buffer()
        finally:
            assert threading.get_ident() == begun
            ended.append(1)

    server.faults["PUT /updates/*/chunks/1"] = [answer(422, kind="wrong-shape")]
    pushed = merged()
    target = [server.url] if several else server.url
    with pytest.raises(UpdateError, match="wrong-shape it is"):
        caller(target, "push", pushed, chunk_bytes=40, chunks_in_flight=1)
    assert ended == [1]
    assert server.states == ["abandoned"]


def test_tensors_of_a_dict_are_not_copied(
    caller: Caller, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(*_: Any, **__: Any) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    caller(server.url, "push", dict(WANTED))
    assert len(server.served) == COUNT
