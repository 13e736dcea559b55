# SPDX-License-Identifier: Apache-2.0
"""Pushing: from what, in which calls, and what is left behind when it fails."""

import _thread
import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import AsyncClient, Replicas
from vllm_fp8ext.serve.client.flow import Endpoint, Request, Wait
from vllm_fp8ext.serve.client.push import abandon_quietly
from vllm_fp8ext.serve.client.source import Pushable
from vllm_fp8ext.serve.schema import Canary

from .conftest import Caller
from .server import KEY, Fault, Handler, Server, answer, chunk, drop, drop_answer, slow

CHUNK_1 = chunk(1)
COMMIT = "POST /updates/*/commit"


def names(calls: list[str], id: str) -> list[str]:
    return [call.replace(id, "u") for call in calls]


class Sharded(Tensor):
    """Looks like a DTensor."""

    def full_tensor(self) -> Tensor:
        raise AssertionError


# --- a checkpoint


def test_a_push_may_leave_the_commit_to_its_caller(caller: Caller, server: Server, checkpoint: Path) -> None:
    ready = caller(server.url, "push", checkpoint, commit=False)
    assert (ready.state, server.epoch) == ("prepared", 0)
    assert names(server.calls, ready.id)[-1] == "POST /updates/u/prepare"
    assert (caller(server.url, "commit", ready.id).state, server.epoch) == ("committed", 1)


@pytest.mark.parametrize("checksum", [True, False])
def test_a_checkpoint_is_sent_and_committed(
    caller: Caller, server: Server, checkpoint: Path, checksum: bool
) -> None:
    seen: list[tuple[int, int | None]] = []
    done = caller(
        server.url,
        "push",
        checkpoint,
        version="step-1",
        base_epoch=0,
        instance="0a1b",
        running="wait",
        wait_seconds=2.0,
        canary=Canary(prompts=[[1, 2]]),
        chunk_bytes=84,
        chunks_in_flight=1,
        checksum=checksum,
        progress=lambda *progress: seen.append(progress),
    )
    assert (done.state, done.version, server.epoch) == ("committed", "step-1", 1)
    assert names(server.calls, done.id) == [
        "POST /updates",
        "PUT /updates/u/chunks/0",
        "PUT /updates/u/chunks/1",
        "POST /updates/u/commit",
    ]
    assert json.loads(server.bodies[0]) == {
        "id": done.id,
        "version": "step-1",
        "base_epoch": 0,
        "instance": "0a1b",
        "running": "wait",
        "wait_seconds": 2.0,
        "canary": {"prompts": [[1, 2]]},
        "partial": False,
    }
    sent = server.bodies[1:3]
    assert [sorted(load(body)) for body in sent] == [["w0", "w1"], ["w2"]]
    assert {name: tensor.tolist() for name, tensor in server.served.items()} == {
        f"w{index}": [float(index)] * (10 + index) for index in range(3)
    }
    for headers, body in zip(server.headers[1:3], sent, strict=True):
        assert headers["content-length"] == str(len(body))
        assert ("content-digest" in headers) == checksum
    total = sum(map(len, sent))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize(
    ("room", "in_flight", "expected"),
    [
        (2 * 84, 1, [["w0", "w1"], ["w2"]]),
        (2 * 84 - 1, 1, [["w0"], ["w1"], ["w2"]]),
        (4 * 84, 3, [["w0", "w1"], ["w2"]]),
        (4 * 84 - 1, 3, [["w0"], ["w1"], ["w2"]]),
    ],
)
def test_chunks_under_way_and_one_more_fit_into_the_servers_room(
    caller: Caller, server: Server, checkpoint: Path, room: int, in_flight: int, expected: list[list[str]]
) -> None:
    server.room = room
    caller(server.url, "push", checkpoint, chunks_in_flight=in_flight)
    assert sorted(sorted(load(body)) for body in server.bodies[1:-1]) == expected


def test_a_checkpoint_that_is_not_there_opens_no_update(
    caller: Caller, server: Server, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="found none"):
        caller(server.url, "push", tmp_path / "missing")
    assert server.calls == []


def test_a_truncated_checkpoint_opens_no_update(caller: Caller, server: Server, checkpoint: Path) -> None:
    file = checkpoint / "2.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(
        ValueError, match=rf"2\.safetensors: .*expected {len(content)} bytes.* found {len(content) - 1}"
    ):
        caller(server.url, "push", str(checkpoint))
    assert server.calls == []


def test_a_checkpoint_that_shrinks_while_it_is_sent_is_abandoned(
    caller: Caller, server: Server, checkpoint: Path
) -> None:
    def shrink(sent: int, total: int | None) -> None:
        (checkpoint / "2.safetensors").write_bytes(b"")

    with pytest.raises(UpdateError, match=r"2\.safetensors was changed while it was read") as refused:
        caller(server.url, "push", checkpoint, chunk_bytes=84, chunks_in_flight=1, progress=shrink)
    assert refused.value.kind == "file-changed"
    assert server.states == ["abandoned"]


# --- tensors

VALUES = {
    "half": torch.arange(12, dtype=torch.float16).reshape(3, 4),
    "brain": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "one": torch.tensor(3.5),
    "none": torch.empty(0, 4),
}
IGNORED = {"ids": torch.arange(3)}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name])
        for name in expected
    )


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
    found = VALUES | IGNORED
    return {name: value if value.dtype == torch.bfloat16 else value.numpy() for name, value in found.items()}


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


# --- failures


@pytest.mark.parametrize("call", [CHUNK_1, COMMIT])
@pytest.mark.parametrize("abandoned", [answer(500), answer(200, b"no json"), drop()])
def test_a_refused_push_is_abandoned_and_raises_the_first_error(
    caller: Caller, server: Server, checkpoint: Path, call: str, abandoned: Any
) -> None:
    server.faults[call] = [answer(422, kind="wrong-shape")]
    server.faults["DELETE /updates/*"] = [abandoned]
    with pytest.raises(UpdateError, match="wrong-shape it is"):
        caller(server.url, "push", checkpoint, chunk_bytes=84, chunks_in_flight=1, retries=0)
    [id] = server.updates
    assert names(server.calls, id)[-2:] == [call.replace("*", "u"), "DELETE /updates/u"]


def test_an_update_that_was_not_opened_is_not_abandoned(
    caller: Caller, server: Server, checkpoint: Path
) -> None:
    server.faults["POST /updates"] = [answer(409, kind="update-open")]
    with pytest.raises(UpdateError, match="update-open it is"):
        caller(server.url, "push", checkpoint)
    assert server.calls == ["POST /updates"]


def test_a_server_that_is_not_there(caller: Caller, server: Server, checkpoint: Path) -> None:
    server.stop()
    with pytest.raises(httpx.ConnectError):
        caller(server.url, "push", checkpoint, retries=0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_push_that_is_given_up_is_abandoned(
    caller: Caller, server: Server, checkpoint: Path, error: type[BaseException]
) -> None:
    def interrupt(sent: int, total: int | None) -> None:
        raise error

    with pytest.raises(error):
        caller(server.url, "push", checkpoint, progress=interrupt)
    assert server.states == ["abandoned"]


def test_another_server_that_the_trainer_could_not_reach_is_not_this_one(
    caller: Caller, server: Server
) -> None:
    def fetched() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        httpx.get("http://127.0.0.1:9", timeout=1)

    with pytest.raises(httpx.ConnectError):
        caller(server.url, "push", fetched())

    def broke_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        raise httpx.ReadError("gone", request=httpx.Request("GET", "http://127.0.0.1:9/shard"))

    with pytest.raises(httpx.ReadError, match="gone"):
        caller(server.url, "push", broke_off())
    assert server.states == ["abandoned", "abandoned"]


def test_this_server_is_known_however_its_url_is_written(
    caller: Caller, server: Server, checkpoint: Path
) -> None:
    server.faults[chunk(0)] = [drop()]
    with pytest.raises(UpdateError) as caught:
        caller(server.url.replace("127.0.0.1", "LOCALHOST"), "push", checkpoint, retries=0)
    assert caught.value.kind == "interrupted"
    assert server.states == ["open"], "it may be gone on with"


def test_nobody_waits_long_to_give_an_update_up() -> None:
    """The server may hang: it is asked twice, and not with the patience of the push."""
    flow = abandon_quietly(Endpoint(url="http://rollout", key=None, timeout=600, retries=4), "u")
    asked = next(flow)
    for _ in range(2):
        assert isinstance(asked, Request)
        assert (asked.method, asked.timeout) == ("DELETE", 10.0)
        try:
            pause = flow.throw(httpx.ReadTimeout("nothing came"))
        except StopIteration:
            return
        assert isinstance(pause, Wait)
        asked = next(flow)
    raise AssertionError("asked a third time")


def test_a_cancelled_push_is_abandoned(server: Server, checkpoint: Path) -> None:
    server.faults[CHUNK_1] = [slow(0.5)]

    async def run() -> None:
        async with AsyncClient(server.url, KEY) as client:
            push = asyncio.create_task(client.push(checkpoint, chunk_bytes=84))
            while not any(call.startswith("PUT") for call in server.calls):
                await asyncio.sleep(0.01)
            push.cancel()
            await push

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert server.states == ["abandoned"]


def opened_and(then: Callable[[], object]) -> Fault:
    """The update is opened, `then` something happens, and the answer comes late."""

    def fault(handler: Handler) -> bool:
        update = handler.scripted.handle("POST /updates", handler.body(), handler.headers)
        then()
        time.sleep(0.3)
        handler.respond(201, update.model_dump_json().encode())
        return True

    return fault


def test_a_push_that_is_cancelled_while_it_opens_is_abandoned(server: Server, checkpoint: Path) -> None:
    async def run() -> None:
        async with AsyncClient(server.url, KEY) as client:
            push = asyncio.create_task(client.push(checkpoint))
            loop = asyncio.get_running_loop()
            server.faults["POST /updates"] = [opened_and(lambda: loop.call_soon_threadsafe(push.cancel))]
            await push

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert server.states == ["abandoned"]


def test_a_push_that_is_interrupted_while_it_opens_is_abandoned(server: Server, checkpoint: Path) -> None:
    server.faults["POST /updates"] = [opened_and(_thread.interrupt_main)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Caller("blocking")(server.url, "push", checkpoint)
    finally:
        signal.signal(signal.SIGINT, before)
    assert server.states == ["abandoned"]


def test_a_number_is_a_version(caller: Caller, server: Server, checkpoint: Path) -> None:
    assert caller(server.url, "push", checkpoint, version=7).version == "7"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"running": "drain"}, r"^running: Input should be 'keep', .*, found 'drain'$"),
        ({"version": ""}, r"^version: .*at least 1 character, found ''$"),
        (
            {"base_epoch": -1, "kv_scales": "calibrate"},
            r"^base_epoch: .*, found -1; kv_scales: .*'calibrate'$",
        ),
    ],
)
def test_arguments_that_are_wrong_open_nothing(
    caller: Caller, server: Server, checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        caller(server.url, "push", checkpoint, **options)
    assert "POST /updates" not in server.calls


@pytest.mark.parametrize("wrong", [None, 7, torch.nn.Linear(2, 2)], ids=["nothing", "a number", "a model"])
def test_what_is_no_weights_is_named(caller: Caller, server: Server, wrong: Any) -> None:
    hint = r" \(its \.state_dict\(\)\?\)" if isinstance(wrong, torch.nn.Module) else ""
    with pytest.raises(
        ValueError, match=f"expected a checkpoint's path, .* found {type(wrong).__name__}{hint}$"
    ):
        caller(server.url, "push", wrong)
    assert server.calls == []


def test_one_text_is_not_several_servers() -> None:
    with pytest.raises(ValueError, match=r"expected the URLs of several servers, found one text, 'http://a'"):
        Replicas("http://a")


@pytest.mark.parametrize("fault", [drop(0), drop(30), drop(), drop_answer, answer(502), answer(503)])
@pytest.mark.parametrize("call", ["POST /updates", CHUNK_1, COMMIT])
def test_faults_that_pass_are_not_noticed(
    caller: Caller, server: Server, checkpoint: Path, call: str, fault: Any
) -> None:
    server.faults[call] = [fault] * 2
    done = caller(server.url, "push", checkpoint, chunk_bytes=84)
    assert (done.state, server.epoch, len(server.updates)) == ("committed", 1, 1)
    assert same(server.served, load_all(checkpoint))


def test_progress_counts_what_is_sent_again_once(caller: Caller, server: Server, checkpoint: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    server.faults[CHUNK_1] = [drop(), drop()]
    caller(server.url, "push", checkpoint, chunk_bytes=84, progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1] == max(done for done, _ in seen)


# --- resuming


def load_all(checkpoint: Path) -> dict[str, Tensor]:
    return {name: tensor for file in checkpoint.iterdir() for name, tensor in load_file(file).items()}


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


# --- on an event loop


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
