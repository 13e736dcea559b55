# SPDX-License-Identifier: Apache-2.0
"""Several chunks under way at the same time: how many, what is taken for them, and what is left of them after a failure."""

import _thread
import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import AsyncClient, repeat
from vllm_fp8ext.serve.client.driver import FLOW_THREADS, BlockingDriver
from vllm_fp8ext.serve.client.flow import Flow, Wait, pipelined, together, work

from .conftest import Caller
from .server import KEY, Fault, Handler, Server, answer, chunk, drop, slow

SECONDS = 60
"""Longest time to wait for something that is about to happen."""


def tensors(count: int) -> dict[str, Tensor]:
    """Of 40 bytes each."""
    return {f"a{n}": torch.full((10,), float(n)) for n in range(count)}


@pytest.fixture
def six(tmp_path: Path) -> Path:
    """A file of six tensors of 40 bytes."""
    save_file(tensors(6), tmp_path / "six.safetensors")
    return tmp_path / "six.safetensors"


def meeting(barrier: threading.Barrier) -> Fault:
    """The call is handled when enough others have come."""

    def fault(handler: Handler) -> bool:
        barrier.wait(SECONDS)
        return False

    return fault


class Overlap:
    """Counts the calls that are being handled at the same time; each takes a moment."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def fault(self, handler: Handler) -> bool:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.05)
        with self._lock:
            self.now -= 1
        return False


def puts(server: Server) -> list[str]:
    return [call.rpartition("/")[2] for call in server.calls if call.startswith("PUT")]


@pytest.mark.parametrize("width", [2, 3])
def test_chunks_are_under_way_together(caller: Caller, server: Server, width: int) -> None:
    """None of them is answered before all of them have come."""
    barrier = threading.Barrier(width)
    server.faults = {chunk(n): [meeting(barrier)] for n in range(6)}
    done = caller(server.url, "push", tensors(6), chunk_bytes=40, chunks_in_flight=width)
    assert (done.state, len(server.served)) == ("committed", 6)


@pytest.mark.parametrize("width", [1, 3])
def test_no_more_are_under_way_than_the_caller_said(caller: Caller, server: Server, width: int) -> None:
    overlap = Overlap()
    server.faults = {chunk(n): [overlap.fault] for n in range(8)}
    caller(server.url, "push", tensors(8), chunk_bytes=40, chunks_in_flight=width)
    assert overlap.most <= width


def test_chunks_go_to_several_servers_together(caller: Caller, start: Callable[..., Server]) -> None:
    servers = [start() for _ in range(3)]
    barrier = threading.Barrier(3 * 2)
    for server in servers:
        server.faults = {chunk(n): [meeting(barrier)] for n in range(4)}
    caller([server.url for server in servers], "push", tensors(4), chunk_bytes=40, chunks_in_flight=2)
    assert [len(server.served) for server in servers] == [4, 4, 4]


def test_an_iterable_is_advanced_by_the_caller_and_by_one_tensor_more(caller: Caller, server: Server) -> None:
    taken: list[int] = []
    seen: list[list[int]] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for n, pair in enumerate(tensors(8).items()):
            taken.append(threading.get_ident())
            yield pair
            assert len(taken) == n + 1

    def look() -> None:
        time.sleep(0.1)
        seen.append(list(taken))

    barrier = threading.Barrier(3, look)
    server.faults = {chunk(n): [meeting(barrier)] for n in range(3)}
    caller(server.url, "push", gathered(), chunk_bytes=40, chunks_in_flight=3)
    assert [len(result) for result in seen] == [4]
    assert set(taken) == {threading.get_ident()}


@pytest.mark.parametrize(("known", "order"), [(True, ["2", "0", "1"]), (False, ["0", "1", "2"])])
def test_what_takes_longest_goes_first_where_it_is_known(
    caller: Caller, server: Server, known: bool, order: list[str]
) -> None:
    weights = tensors(2) | {"long": torch.ones(11)}
    given = weights if known else iter(weights.items())
    caller(server.url, "push", given, chunk_bytes=40, chunks_in_flight=1)
    assert puts(server) == order
    assert torch.equal(server.served["long"], weights["long"])


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("name", ["chunk_bytes", "chunks_in_flight"])
def test_numbers_that_are_none(caller: Caller, server: Server, name: str, number: int) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, found {number}"):
        caller(server.url, "push", tensors(1), **{name: number})
    assert server.calls == []


# --- progress


def test_progress_adds_up_chunks_under_way(caller: Caller, server: Server) -> None:
    seen: list[tuple[int, int]] = []
    meanwhile: list[tuple[int, int]] = []

    def look() -> None:
        time.sleep(0.1)
        meanwhile.append(seen[-1])

    barrier = threading.Barrier(3, look)
    server.faults = {chunk(n): [meeting(barrier)] for n in range(6)}
    caller(
        server.url,
        "push",
        tensors(6),
        chunk_bytes=40,
        chunks_in_flight=3,
        progress=lambda *at: seen.append(at),
    )
    total = seen[-1][1]
    assert seen == sorted(seen)
    assert meanwhile == [(total // 2, total), (total, total)]


def test_progress_takes_back_what_is_sent_again(caller: Caller, server: Server) -> None:
    seen: list[int] = []
    server.faults = {chunk(n): [slow(0.05), drop()] for n in range(4)}
    server.faults[chunk(2)] = [drop(), drop()]
    caller(server.url, "push", tensors(4), chunk_bytes=40, progress=lambda *at: seen.append(at[0]))
    assert seen[-1] == max(seen) == sum(len(body) for body in server.chunks.popitem()[1].values())


# --- failures


def test_the_first_failure_begins_nothing_new(caller: Caller, server: Server) -> None:
    barrier = threading.Barrier(3)

    def refuse(handler: Handler) -> bool:
        barrier.wait(SECONDS)
        return answer(422, kind="wrong-shape")(handler)

    def stay(handler: Handler) -> bool:
        barrier.wait(SECONDS)
        return slow(0.3)(handler)

    server.faults = {chunk(0): [stay], chunk(1): [refuse], chunk(2): [stay]}
    with pytest.raises(UpdateError, match="wrong-shape it is"):
        caller(server.url, "push", tensors(6), chunk_bytes=40, chunks_in_flight=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(FLOW_THREADS)]
    assert sorted(puts(server)) == ["0", "1", "2"]
    assert server.states == ["abandoned"]
    assert server.calls[-1].startswith("DELETE")


def test_a_body_under_way_breaks_off(caller: Caller, server: Server) -> None:
    length, read = 64 << 20, [0]
    refused, over = threading.Event(), threading.Event()

    def read_late(handler: Handler) -> bool:
        read[0] += len(handler.rfile.read(1 << 20))
        assert refused.wait(SECONDS)
        while result := handler.rfile.read1(1 << 20):
            read[0] += len(result)
        over.set()
        handler.hang_up()
        return True

    def refuse(handler: Handler) -> bool:
        while not read[0]:
            time.sleep(0.01)
        answer(422, kind="wrong-shape")(handler)
        threading.Timer(0.3, refused.set).start()
        return True

    server.faults = {chunk(0): [read_late], chunk(1): [refuse]}
    weights = {"long": torch.zeros(length, dtype=torch.uint8).view(torch.float32), "short": torch.zeros(1)}
    with pytest.raises(UpdateError, match="wrong-shape it is"):
        caller(server.url, "push", weights, chunk_bytes=length, checksum=False)
    assert over.wait(SECONDS)
    assert read[0] < length // 2


def test_a_pause_between_repetitions_is_cut_short(
    caller: Caller, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat, "FIRST_SECONDS", 2 * SECONDS)
    monkeypatch.setattr(repeat, "LONGEST_SECONDS", 2 * SECONDS)
    failed = threading.Event()

    def fail(handler: Handler) -> bool:
        answer(503)(handler)
        failed.set()
        return True

    def refuse_after(handler: Handler) -> bool:
        failed.wait(SECONDS)
        time.sleep(0.1)
        return answer(422, kind="wrong-shape")(handler)

    server.faults = {chunk(0): [fail], chunk(1): [refuse_after]}
    start = time.monotonic()
    with pytest.raises(UpdateError, match="wrong-shape it is"):
        caller(server.url, "push", tensors(2), chunk_bytes=40, timeout=1000)
    assert time.monotonic() - start < SECONDS / 2
    assert puts(server).count("0") == 1


def test_a_pause_of_one_of_several_servers_is_cut_short_too() -> None:
    """Its chunk is sent to all of them beside each other, beside other chunks."""
    pausing = threading.Event()

    def pause() -> Flow[None]:
        yield from work(pausing.set)
        yield Wait(10 * SECONDS)

    def to_all() -> Flow[None]:
        yield from together([pause()])

    def fail() -> Flow[None]:
        assert (yield from work(lambda: pausing.wait(SECONDS)))
        raise ValueError("refused")

    start = time.monotonic()
    with pytest.raises(ValueError, match="refused"):
        BlockingDriver().run(pipelined(iter([to_all(), fail()]), 2))
    assert time.monotonic() - start < 2 * SECONDS


def test_an_interrupt_ends_what_is_under_way(server: Server) -> None:
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in what a shell runs beside itself
    try:
        _interrupted(server)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_is_told_to_end_gives_its_update_up(server: Server, six: Path) -> None:
    """As by `timeout`, or by a cluster that wants its node back."""
    server.faults[chunk(0)] = [slow(1.0)]
    line = [
        sys.executable,
        "-P",
        "-m",
        "vllm_fp8ext.cli",
        "push",
        str(six),
        "--url",
        server.url,
        "--key",
        KEY,
    ]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        while not puts(server):
            time.sleep(0.01)
        process.terminate()
        _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "the update was given up, unless its commit had begun" in " ".join(said.split())
    assert server.states == ["abandoned"]


def _interrupted(server: Server) -> None:
    barrier = threading.Barrier(2, _thread.interrupt_main)

    def stay(handler: Handler) -> bool:
        barrier.wait(SECONDS)
        return slow(0.3)(handler)

    server.faults = {chunk(0): [stay], chunk(1): [stay]}
    with pytest.raises(KeyboardInterrupt):
        Caller("blocking")(server.url, "push", tensors(6), chunk_bytes=40, chunks_in_flight=2)
    assert sorted(puts(server)) == ["0", "1"]
    assert server.states == ["abandoned"]
    assert server.calls[-1].startswith("DELETE")


def test_a_failing_iterable_ends_what_is_under_way(caller: Caller, server: Server) -> None:
    def gathered() -> Iterator[tuple[str, Tensor]]:
        yield from tensors(3).items()
        raise RuntimeError("a rank went away")

    server.faults = {chunk(n): [slow(0.3)] for n in range(3)}
    with pytest.raises(RuntimeError, match="a rank went away"):
        caller(server.url, "push", gathered(), chunk_bytes=40)
    assert server.states == ["abandoned"]


def test_a_cancelled_push_leaves_no_task_behind(server: Server) -> None:
    server.faults = {chunk(n): [slow(0.5)] for n in range(4)}

    async def run() -> int:
        async with AsyncClient(server.url, KEY) as client:
            push = asyncio.create_task(client.push(tensors(4), chunk_bytes=40, chunks_in_flight=3))
            while len(puts(server)) < 3:
                await asyncio.sleep(0.01)
            push.cancel()
            with pytest.raises(asyncio.CancelledError):
                await push
            return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
    assert server.states == ["abandoned"]


@pytest.mark.parametrize("fault", [drop(), answer(502)])
def test_what_was_staged_before_an_interruption_is_not_sent_again(
    caller: Caller, server: Server, six: Path, fault: Any
) -> None:
    server.faults[chunk(4)] = [fault]
    with pytest.raises(UpdateError) as caught:
        caller(server.url, "push", six, chunk_bytes=40, chunks_in_flight=3, retries=0)
    assert caught.value.kind == "interrupted"
    assert not any(call.startswith("DELETE") for call in server.calls)
    id = caught.value.details["id"]
    staged = set(server.chunks[id])
    assert len(staged) >= 2
    server.calls.clear()
    done = caller(server.url, "push", six, chunk_bytes=40, chunks_in_flight=3, id=id)
    assert (done.state, len(server.served)) == ("committed", 6)
    assert staged.isdisjoint(puts(server))
    assert "4" in puts(server)
