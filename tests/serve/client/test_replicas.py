# SPDX-License-Identifier: Apache-2.0
"""Several servers: all of them or none, in phases, and what is said when that can't be kept."""

import _thread
import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import AsyncReplicas, Replicas
from vllm_fp8ext.serve.client.transports.nccl.buckets import PackingBuffer
from vllm_fp8ext.serve.schema import BroadcastGroup

from .conftest import Caller
from .server import KEY, Handler, Server, answer, chunk, drop, drop_answer, slow

OPEN = "POST /updates"
CHUNK_1 = chunk(1)
PREPARE = "POST /updates/*/prepare"
COMMIT = "POST /updates/*/commit"
Journal = list[tuple[str, str]]


@pytest.fixture
def servers(start: Callable[..., Server]) -> list[Server]:
    return [start() for _ in range(3)]


def urls(servers: list[Server]) -> list[str]:
    return [server.url for server in servers]


def states(servers: list[Server]) -> list[list[str]]:
    return [server.states for server in servers]


def test_phases_come_one_after_the_other(
    caller: Caller, servers: list[Server], journal: Journal, checkpoint: Path
) -> None:
    done = caller(urls(servers), "push", checkpoint, version="v", chunk_bytes=84, chunks_in_flight=1)
    [id] = {update.id for update in done.values()}
    assert list(done) == urls(servers)
    assert {update.state for update in done.values()} == {"committed"}
    expected = [
        "POST /updates",
        f"PUT /updates/{id}/chunks/0",
        f"PUT /updates/{id}/chunks/1",
        f"POST /updates/{id}/prepare",
        f"POST /updates/{id}/commit",
    ]
    assert [call for _, call in journal] == [call for call in expected for _ in servers]
    for n in range(len(expected)):
        assert {url for url, _ in journal[3 * n : 3 * n + 3]} == set(urls(servers))
    assert {tuple(sorted(server.served)) for server in servers} == {("w0", "w1", "w2")}


def test_each_server_is_told_its_own_life(caller: Caller, servers: list[Server], checkpoint: Path) -> None:
    lives = {servers[0].url: "0a", servers[2].url: "0c"}
    caller(urls(servers), "push", checkpoint, instances=lives)
    opened = [json.loads(server.bodies[0]) for server in servers]
    assert [body.get("instance") for body in opened] == ["0a", None, "0c"]


def test_an_iterable_is_gone_through_once_for_all(caller: Caller, servers: list[Server]) -> None:
    taken: list[str] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for n in range(4):
            taken.append(f"a{n}")
            yield f"a{n}", torch.full((10,), float(n))

    caller(urls(servers), "push", gathered(), chunk_bytes=40)
    assert taken == ["a0", "a1", "a2", "a3"]
    for server in servers:
        assert {name: tensor[0].item() for name, tensor in server.served.items()} == {
            f"a{n}": float(n) for n in range(4)
        }


@pytest.mark.parametrize("checksum", [True, False])
def test_a_tensor_is_copied_once_for_all(
    caller: Caller, servers: list[Server], monkeypatch: pytest.MonkeyPatch, checksum: bool
) -> None:
    copied: list[tuple[int, ...]] = []
    original = torch.Tensor.cpu

    def cpu(tensor: Tensor) -> Tensor:
        copied.append(tuple(tensor.shape))
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    servers[0].faults[chunk(0)] = [drop(), drop()]
    caller(urls(servers), "push", {"a": torch.ones(5), "b": torch.ones(6)}, checksum=checksum)
    assert copied == [(5,), (6,)]


def test_the_smallest_room_decides(caller: Caller, servers: list[Server], checkpoint: Path) -> None:
    servers[1].room = 90
    caller(urls(servers), "push", checkpoint)
    assert [sorted(server.updates.values(), key=str)[0].chunks.keys() for server in servers] == [
        {"0", "1", "2"}
    ] * 3


def test_only_dtypes_that_all_take_are_sent(caller: Caller, servers: list[Server]) -> None:
    servers[2].manifest["dtypes"] = ["bfloat16"]
    with pytest.raises(ValueError, match="tensor a: expected dtype bfloat16, found float32"):
        caller(urls(servers), "push", {"a": torch.ones(2)})
    assert states(servers) == [[], [], []]


def test_progress_counts_all_servers(caller: Caller, servers: list[Server], checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    servers[1].faults[CHUNK_1] = [drop()]
    caller(urls(servers), "push", checkpoint, chunk_bytes=84, progress=lambda *at: seen.append(at))
    total = 3 * sum(len(body) for body in servers[0].chunks.popitem()[1].values())
    assert seen[-1] == (total, total)
    assert max(done for done, _ in seen) == total


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (OPEN, answer(409, kind="update-open")),
        (CHUNK_1, answer(422, kind="wrong-shape")),
        (CHUNK_1, drop(30)),
        (PREPARE, answer(422, kind="canary-failed")),
        (PREPARE, drop()),
    ],
)
def test_a_failure_before_the_first_commit_commits_nowhere(
    caller: Caller, servers: list[Server], checkpoint: Path, call: str, fault: Any
) -> None:
    servers[1].faults[call] = [fault] * 2
    with pytest.raises(UpdateError) as caught:
        caller(urls(servers), "push", checkpoint, chunk_bytes=84, retries=1)
    assert caught.value.kind == "not-committed"
    assert list(caught.value.details["failed"]) == [servers[1].url]
    assert servers[1].url in str(caught.value)
    assert caught.value.details["failed"][servers[1].url] in str(caught.value)
    assert [server.epoch for server in servers] == [0, 0, 0]
    assert all(state == ["abandoned"] for state in states(servers) if state)
    assert sum(map(len, states(servers))) == (2 if call == OPEN else 3)
    assert not any("commit" in call for server in servers for call in server.calls)


def test_every_failure_is_named(caller: Caller, servers: list[Server], checkpoint: Path) -> None:
    for server, kind in zip(servers[1:], ("stale-base", "update-open"), strict=True):
        server.faults[OPEN] = [answer(409, kind=kind)]
    with pytest.raises(UpdateError) as caught:
        caller(urls(servers), "push", checkpoint)
    assert caught.value.details["failed"] == {
        servers[1].url: "stale-base it is",
        servers[2].url: "update-open it is",
    }


def test_an_interrupt_gives_the_updates_up_everywhere(start: Callable[..., Server], checkpoint: Path) -> None:
    servers = [start(), start()]

    def interrupted(handler: Handler) -> bool:
        end = time.monotonic() + 120
        while not servers[1].states and time.monotonic() < end:
            time.sleep(0.01)
        _thread.interrupt_main()
        return slow(0.5)(handler)

    servers[0].faults["POST /updates"] = [interrupted]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Replicas([server.url for server in servers], KEY) as replicas:
            replicas.push(checkpoint)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [server.states for server in servers] == [["abandoned"]] * 2


def test_an_interrupt_does_not_wait_for_commits(start: Callable[..., Server], checkpoint: Path) -> None:
    """They may wait for running requests, and then be what is served."""
    servers, ending = [start(), start()], threading.Event()

    def interrupted(handler: Handler) -> bool:
        # as from a terminal: what the main thread waits for is interrupted, too
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        ending.wait(60)
        return False

    servers[0].faults[COMMIT] = [interrupted]
    servers[1].faults[COMMIT] = [lambda handler: not ending.wait(60)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Replicas([server.url for server in servers], KEY) as replicas:
            replicas.push(checkpoint, running="wait")
        assert [server.states for server in servers] == [["abandoned"]] * 2
    finally:
        signal.signal(signal.SIGINT, before)
        ending.set()


def test_an_update_that_was_opened_unseen_is_abandoned_too(
    caller: Caller, servers: list[Server], checkpoint: Path
) -> None:
    servers[0].faults[OPEN] = [drop_answer]
    with pytest.raises(UpdateError, match=servers[0].url):
        caller(urls(servers), "push", checkpoint, retries=0)
    assert states(servers) == [["abandoned"]] * 3


@pytest.mark.parametrize("wrong", [{"a": torch.ones(2, dtype=torch.int8)}, "missing"])
def test_what_cannot_be_sent_is_no_servers_fault(caller: Caller, servers: list[Server], wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"tensor a|found none"):
        caller(urls(servers), "push", wrong)
    assert states(servers) == [[], [], []]


def test_an_iterable_that_fails_is_abandoned_everywhere(caller: Caller, servers: list[Server]) -> None:
    def gathered() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(3)
        yield "b", torch.ones(3)
        raise RuntimeError("a rank went away")

    with pytest.raises(RuntimeError, match="a rank went away"):
        caller(urls(servers), "push", gathered(), chunk_bytes=1)
    assert states(servers) == [["abandoned"]] * 3


def test_a_commit_that_all_refuse_is_abandoned(
    caller: Caller, servers: list[Server], checkpoint: Path
) -> None:
    for server in servers:
        server.faults[COMMIT] = [answer(409, kind="paused")]
    with pytest.raises(UpdateError) as caught:
        caller(urls(servers), "push", checkpoint)
    assert (caught.value.kind, len(caught.value.details["failed"])) == ("not-committed", 3)
    assert states(servers) == [["abandoned"]] * 3


@pytest.mark.parametrize("fault", [answer(409, kind="paused"), answer(500), drop(), drop_answer])
def test_a_commit_that_fails_for_a_while_is_repeated(
    caller: Caller, servers: list[Server], checkpoint: Path, fault: Any
) -> None:
    servers[1].faults[COMMIT] = [fault] * 3
    done = caller(urls(servers), "push", checkpoint)
    assert [update.state for update in done.values()] == ["committed"] * 3
    assert [server.epoch for server in servers] == [1, 1, 1]


@pytest.mark.parametrize("fault", [answer(409, kind="paused"), drop()])
def test_a_commit_that_fails_for_good_is_told_and_can_be_caught_up(
    caller: Caller, servers: list[Server], checkpoint: Path, fault: Any
) -> None:
    servers[1].faults[COMMIT] = [fault] * 100
    with pytest.raises(UpdateError) as caught:
        caller(urls(servers), "push", checkpoint, retries=1)
    error = caught.value
    assert error.kind == "partly-committed"
    assert error.details["committed"] == {servers[0].url: 1, servers[2].url: 1}
    assert list(error.details["failed"]) == [servers[1].url]
    assert servers[1].url in str(error)
    assert states(servers) == [["committed"], ["prepared"], ["committed"]]
    servers[1].faults.clear()
    done = caller(urls(servers), "push", checkpoint, id=error.details["id"])
    assert [update.state for update in done.values()] == ["committed"] * 3
    assert [server.epoch for server in servers] == [1, 1, 1]
    assert [sum("chunks" in call for call in server.calls) for server in servers] == [1, 1, 1]


@pytest.mark.parametrize("call", [OPEN, PREPARE])
@pytest.mark.parametrize("fault", [answer(409, kind="paused"), drop()])
def test_what_some_serve_is_not_taken_back_when_catching_up_fails(
    caller: Caller, servers: list[Server], checkpoint: Path, call: str, fault: Any
) -> None:
    """The others can follow later."""
    servers[1].faults[COMMIT] = [answer(409, kind="paused")] * 100
    with pytest.raises(UpdateError) as caught:
        caller(urls(servers), "push", checkpoint, retries=0)
    id = caught.value.details["id"]
    servers[1].faults = {call: [fault] * 3}
    with pytest.raises(UpdateError) as again:
        caller(urls(servers), "push", checkpoint, id=id, retries=0)
    assert (again.value.kind, again.value.details["id"]) == ("partly-committed", id)
    assert again.value.details["committed"] == {servers[0].url: 1, servers[2].url: 1}
    assert list(again.value.details["failed"]) == [servers[1].url]
    assert states(servers) == [["committed"], ["prepared"], ["committed"]]
    servers[1].faults.clear()
    done = caller(urls(servers), "push", checkpoint, id=id)
    assert [update.state for update in done.values()] == ["committed"] * 3


def test_what_a_lost_server_may_serve_is_not_taken_back(
    caller: Caller, servers: list[Server], checkpoint: Path
) -> None:
    servers[1].faults[COMMIT] = [answer(409, kind="paused")] * 100
    with pytest.raises(UpdateError) as caught:
        caller(urls(servers), "push", checkpoint, retries=0)
    id = caught.value.details["id"]
    for server in (servers[0], servers[2]):
        server.faults[OPEN] = [drop()]
    with pytest.raises(UpdateError) as again:
        caller(urls(servers), "push", checkpoint, id=id, retries=0)
    assert (again.value.kind, again.value.details["committed"]) == ("partly-committed", {})
    assert states(servers)[1] == ["prepared"]


def test_chunks_stay_as_they_were_when_others_catch_up(
    caller: Caller, servers: list[Server], checkpoint: Path
) -> None:
    """Also where only those that are served already had little room."""
    servers[0].room = 170
    servers[1].faults[COMMIT] = [answer(409, kind="paused")] * 100
    with pytest.raises(UpdateError) as caught:
        caller(urls(servers), "push", checkpoint, chunks_in_flight=1, retries=0)
    id = caught.value.details["id"]
    before = {n: sorted(load(body)) for n, body in servers[1].chunks[id].items()}
    assert len(before) > 1
    servers[1].faults.clear()
    tensors = [(f"w{index}", torch.full((10 + index,), float(index))) for index in range(3)]
    caller(urls(servers), "push", iter(tensors), chunks_in_flight=1, id=id)
    assert {n: sorted(load(body)) for n, body in servers[1].chunks[id].items()} == before


def test_commits_that_may_have_happened_are_not_called_off(
    caller: Caller, servers: list[Server], checkpoint: Path
) -> None:
    for server in servers:
        server.faults[COMMIT] = [drop()] * 100
    with pytest.raises(UpdateError) as caught:
        caller(urls(servers), "push", checkpoint, retries=1)
    assert (caught.value.kind, caught.value.details["committed"]) == ("partly-committed", {})
    assert states(servers) == [["prepared"]] * 3


def test_a_commit_that_a_busy_engine_comes_to_later_is_not_called_off(
    caller: Caller, servers: list[Server], checkpoint: Path
) -> None:
    servers[0].faults[COMMIT] = [answer(504, kind="engine-timeout")] * 100
    servers[1].faults[COMMIT] = [answer(409, kind="wait-timeout")] * 100
    servers[2].faults[COMMIT] = [answer(409, kind="wait-timeout")] * 100
    with pytest.raises(UpdateError) as caught:
        caller(urls(servers), "push", checkpoint, retries=1)
    assert (caught.value.kind, caught.value.details["committed"]) == ("partly-committed", {})
    assert states(servers) == [["prepared"]] * 3


def test_a_chunk_that_one_server_has_is_sent_to_the_others(
    caller: Caller, servers: list[Server], checkpoint: Path
) -> None:
    servers[0].faults[CHUNK_1] = [drop()]
    with pytest.raises(UpdateError, match="mine"):
        caller(servers[0].url, "push", checkpoint, chunk_bytes=84, chunks_in_flight=1, id="mine", retries=0)
    caller(urls(servers), "push", checkpoint, chunk_bytes=84, id="mine")
    sent = [[call for call in server.calls if "chunks/0" in call] for server in servers]
    assert [len(calls) for calls in sent] == [1, 1, 1]
    assert [sorted(load(server.chunks["mine"]["1"])) for server in servers] == [["w2"]] * 3


@pytest.mark.parametrize("wrong", [[], ["http://a", "http://a/"]])
def test_servers_are_distinct(caller: Caller, wrong: list[str], checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="expected distinct URLs"):
        caller(wrong, "push", checkpoint)


class Rankless:
    """A group of broadcasts in which nobody takes part."""

    seconds = 60.0

    def confirm(self, groups: Any) -> None: ...

    def meet(self, ranks: dict[str, int], device: Any) -> dict[str, BroadcastGroup]:
        group = BroadcastGroup(backend="gloo", id="host:1/name", size=2, first_rank=1)
        return dict.fromkeys(ranks, group)

    def room(self, ranks: dict[str, int], n: int, device: Any) -> PackingBuffer:
        return PackingBuffer(device)

    def close(self) -> None: ...


def test_a_broadcast_that_a_server_refuses_names_it(caller: Caller, servers: list[Server]) -> None:
    for server, kind in zip(servers, ("chunk-too-large", "other-update", "asleep"), strict=True):
        server.faults["POST /updates/*/receive"] = [answer(409, kind=kind)]
    group: Any = Rankless()
    with pytest.raises(UpdateError) as caught:
        caller(urls(servers), "push", {"a": torch.ones(3)}, transport="nccl", group=group)
    assert caught.value.kind == "not-committed"
    assert caught.value.details["failed"] == {
        servers[0].url: "chunk-too-large it is",
        servers[1].url: "other-update it is",
        servers[2].url: "asleep it is",
    }
    assert states(servers) == [["abandoned"]] * 3


def test_a_commit_that_is_cancelled_is_given_up(servers: list[Server], checkpoint: Path) -> None:
    """Servers whose commit waits for running requests would serve it when nobody wants it any more."""
    for server in servers:
        server.faults[COMMIT] = [slow(3)]

    async def push() -> None:
        async with AsyncReplicas(urls(servers), KEY) as replicas, asyncio.timeout(2):
            await replicas.push(checkpoint, running="wait", id="u")

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(push())
    assert all("DELETE /updates/u" in server.calls for server in servers)
    assert "update u was about to be committed" in str(caught.value.__cause__.__notes__)  # type: ignore[union-attr]
