# SPDX-License-Identifier: Apache-2.0
"""Pushes that go on after an interruption, and pushes on an event loop."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import AsyncClient

from .conftest import Caller
from .pushes import (
    CHUNK_1,
    COMMIT,
    load_all,
    same,
)
from .server import KEY, Handler, Server, answer, drop, drop_answer, slow


@pytest.mark.parametrize("fault", [drop(), answer(502)])
@pytest.mark.parametrize("call", ["POST /updates", CHUNK_1, COMMIT])
def test_an_interrupted_push_stays_open_and_goes_on(
    caller: Caller, server: Server, checkpoint: Path, call: str, fault: Any
) -> None:
    server.faults[call] = [fault] * 3
    with pytest.raises(UpdateError) as caught:
        caller(server.url, "push", checkpoint, chunk_bytes=84, chunks_in_flight=1, retries=2)
    id = caught.value.details["id"]
    assert caught.value.kind == "interrupted"
    assert f"id={id!r}" in str(caught.value)
    assert server.url in str(caught.value)
    assert not any(call.startswith("DELETE") for call in server.calls)
    staged = set(server.chunks.get(id, ()))
    server.calls.clear()
    done = caller(server.url, "push", checkpoint, chunk_bytes=84, id=id)
    assert (done.state, server.epoch) == ("committed", 1)
    assert sorted(call[-1] for call in server.calls if call.startswith("PUT")) == sorted({"0", "1"} - staged)
    assert same(server.served, load_all(checkpoint))


def test_an_update_that_may_have_been_opened_is_named(
    caller: Caller, start: Callable[..., Server], checkpoint: Path
) -> None:
    """Its answer was lost, and then nobody listened any more."""
    server = start()

    def last(handler: Handler) -> bool:
        handler.answered = False
        server._http.socket.close()
        return False

    server.faults["POST /updates"] = [last]
    with pytest.raises(UpdateError) as caught:
        caller(server.url, "push", checkpoint, id="mine", retries=2)
    assert (caught.value.kind, caught.value.details["id"]) == ("interrupted", "mine")
    assert server.states == ["open"]


def test_a_commit_that_waits_for_requests_may_take_longer(
    caller: Caller, server: Server, checkpoint: Path
) -> None:
    """As long as a server waits where nobody says for how long."""
    server.faults[COMMIT] = [slow(3)]
    done = caller(server.url, "push", checkpoint, running="wait", timeout=2, retries=0)
    assert done.state == "committed"


def test_a_chunk_that_was_staged_otherwise_is_sent_again(
    caller: Caller, server: Server, checkpoint: Path
) -> None:
    caller(server.url, "open", id="mine")
    caller(server.url, "put_chunk", "mine", 0, save({"w0": torch.full((10,), 7.0)}))
    caller(server.url, "push", checkpoint, chunk_bytes=84, id="mine")
    assert same(server.served, load_all(checkpoint))


def test_tensors_are_sent_again(caller: Caller, server: Server) -> None:
    """Nobody knows whether they are those of before."""
    caller(server.url, "open", id="mine")
    server.faults[COMMIT] = [drop()]
    with pytest.raises(UpdateError, match="mine"):
        caller(server.url, "push", {"a": torch.zeros(3)}, id="mine", retries=0)
    caller(server.url, "push", {"a": torch.ones(3)}, id="mine")
    assert same(server.served, {"a": torch.ones(3)})


def test_a_commit_whose_answer_was_lost_is_found_to_be_done(
    caller: Caller, server: Server, checkpoint: Path
) -> None:
    server.faults[COMMIT] = [drop_answer]
    with pytest.raises(UpdateError) as caught:
        caller(server.url, "push", checkpoint, retries=0)
    calls_before = len(server.calls)
    done = caller(server.url, "push", checkpoint, id=caught.value.details["id"])
    assert (done.state, server.epoch) == ("committed", 1)
    assert server.calls[calls_before:] == ["POST /updates"]


def test_a_commit_that_a_busy_engine_comes_to_later_is_not_called_off(
    caller: Caller, server: Server, checkpoint: Path
) -> None:
    server.faults[COMMIT] = [answer(504, kind="engine-timeout")]
    with pytest.raises(UpdateError) as caught:
        caller(server.url, "push", checkpoint, retries=0)
    assert (caught.value.kind, server.states) == ("interrupted", ["open"]), (
        "its commit would prepare it first"
    )
    done = caller(server.url, "push", checkpoint, id=caught.value.details["id"])
    assert (done.state, server.epoch) == ("committed", 1)


def test_the_event_loop_goes_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """While tensors are fetched and hashed, and while their pieces are read: these wait for it."""
    from vllm_fp8ext.serve.tensors import HostPart, TensorPart

    fetched, pieces = TensorPart.fetched, HostPart.pieces
    ticks = threading.Event()
    seen: list[bool] = []

    def see() -> None:
        ticks.clear()
        seen.append(ticks.wait(60))

    def slowly_fetched(part: TensorPart) -> HostPart:
        see()
        return fetched(part)

    def slow_pieces(part: HostPart) -> Iterator[bytes]:
        see()
        yield from pieces(part)

    monkeypatch.setattr(TensorPart, "fetched", slowly_fetched)
    monkeypatch.setattr(HostPart, "pieces", slow_pieces)

    async def run() -> None:
        async def tick() -> None:
            while True:
                await asyncio.sleep(0.005)
                ticks.set()

        async with AsyncClient(server.url, KEY) as client:
            ticking = asyncio.create_task(tick())
            await client.push({"a": torch.ones(3)})
            ticking.cancel()

    asyncio.run(run())
    assert len(seen) >= 2
    assert all(seen)


def test_many_can_be_awaited_at_once(server: Server) -> None:
    all_there = threading.Barrier(5)

    def wait_for_all(handler: Handler) -> bool:
        all_there.wait(60)
        return False

    server.faults["GET /weights"] = [wait_for_all] * 5

    async def run() -> None:
        async with AsyncClient(server.url, KEY) as client:
            await asyncio.gather(*(client.weights() for _ in range(5)))

    asyncio.run(run())
    assert not all_there.broken


def test_a_server_that_accepts_late_is_waited_for(caller: Caller) -> None:
    """The connection is made by the kernel; nobody answers, until the timeout."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(httpx.ReadTimeout):
            caller(url, "weights", timeout=0.4)
        assert time.monotonic() - start > 0.35
