# SPDX-License-Identifier: Apache-2.0
"""What is left behind by pushes that fail, are cancelled or have wrong arguments."""

import _thread
import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import AsyncClient, Replicas
from vllm_fp8ext.serve.client.flow import Endpoint, Request, Wait
from vllm_fp8ext.serve.client.push import abandon_quietly

from .conftest import Caller
from .pushes import (
    CHUNK_1,
    COMMIT,
    load_all,
    names,
    same,
)
from .server import KEY, Fault, Handler, Server, answer, chunk, drop, drop_answer, slow


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
