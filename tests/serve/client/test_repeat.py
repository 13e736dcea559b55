# SPDX-License-Identifier: Apache-2.0
"""Which calls are sent again after which failure, and how often."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from safetensors.torch import save
from torch import ones

from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.serve.client import Client, repeat
from vllm_fp8ext.serve.client.flow import Endpoint

from .conftest import Caller
from .server import Server, answer, chunk, drop, drop_answer, slow

BODY = save({"a": ones(300_000)})


@dataclass(frozen=True)
class Operation:
    """A method, its arguments, and how its call looks to the server."""

    method: str
    call: str
    arguments: Callable[[], tuple[Any, ...]] = tuple
    named: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.method


CHUNK = chunk(0)
PUT = Operation("put_chunk", CHUNK, lambda: ("u1", 0, BODY))
ONE_SHOT = Operation("put_chunk", CHUNK, lambda: ("u1", 0, iter([BODY]), len(BODY)))
REPEATED = [
    Operation("weights", "GET /weights"),
    Operation("manifest", "GET /weights/manifest"),
    Operation("update", "GET /updates/*", lambda: ("u1",)),
    Operation("open", "POST /updates", named={"id": "u1"}),
    PUT,
    Operation("prepare", "POST /updates/*/prepare", lambda: ("u1",)),
    Operation("commit", "POST /updates/*/commit", lambda: ("u1",)),
    Operation("abandon", "DELETE /updates/*", lambda: ("u1",)),
]
NEVER = [
    Operation("rollback", "POST /rollback"),
    Operation("load", "POST /load", lambda: ("/data/x",)),
    Operation("files", "POST /updates/*/files", lambda: ("u1", "/data/x")),
    ONE_SHOT,
]
FAULTS = {
    "dropped at once": drop(0),
    "dropped in mid-body": drop(70_000),
    "dropped before it was done": drop(),
    "dropped after it was done": drop_answer,
    "502": answer(502, b"<html>Bad Gateway</html>"),
    "503": answer(503),
    "504": answer(504, kind="engine-timeout"),
}
FINAL = {
    "poisoned": answer(503, kind="poisoned"),
    "engine-dead": answer(500, kind="engine-dead"),
    "500": answer(500),
    "refused": answer(409, kind="stale-base"),
    "expired": answer(410, kind="expired"),
}


@pytest.fixture
def opened(server: Server) -> Server:
    Caller("blocking")(server.url, "open", id="u1")
    server.calls.clear()
    return server


def asked(server: Server, operation: Operation) -> int:
    """How often the operation's call came."""
    return sum(call.replace("u1", "*") == operation.call for call in server.calls)


def make(caller: Caller, server: Server, operation: Operation, **options: Any) -> Any:
    return caller(server.url, operation.method, *operation.arguments(), **operation.named, **options)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", REPEATED, ids=str)
def test_what_may_be_repeated_is_repeated(
    caller: Caller, opened: Server, operation: Operation, fault: str
) -> None:
    opened.faults[operation.call] = [FAULTS[fault]] * 2
    make(caller, opened, operation)
    assert asked(opened, operation) == 3
    if operation is PUT:
        assert opened.chunks["u1"]["0"] == BODY
    if operation.method == "open":
        assert list(opened.updates) == ["u1"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", NEVER, ids=str)
def test_what_may_not_be_repeated_is_not(
    caller: Caller, opened: Server, operation: Operation, fault: str
) -> None:
    opened.faults[operation.call] = [FAULTS[fault]]
    with pytest.raises((httpx.TransportError, UpdateError)):
        make(caller, opened, operation)
    assert asked(opened, operation) == 1


@pytest.mark.parametrize("fault", FINAL)
@pytest.mark.parametrize("operation", [*REPEATED, *NEVER], ids=str)
def test_a_refusal_is_final(caller: Caller, opened: Server, operation: Operation, fault: str) -> None:
    opened.faults[operation.call] = [FINAL[fault]]
    with pytest.raises(UpdateError):
        make(caller, opened, operation)
    assert asked(opened, operation) == 1


@pytest.mark.parametrize("operation", [PUT, *NEVER[:2]], ids=str)
def test_what_was_not_sent_is_sent_once_the_server_listens(
    caller: Caller, start: Callable[..., Server], operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat, "FIRST_SECONDS", 0.1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started: list[Server] = []

    timer = threading.Timer(0.15, lambda: started.append(start(port, "u1")))
    timer.start()
    caller(f"http://127.0.0.1:{port}", operation.method, *operation.arguments(), retries=9)
    timer.join()
    assert asked(started[0], operation) == 1


def test_retries_are_counted(caller: Caller, opened: Server) -> None:
    opened.faults["GET /weights"] = [drop()] * 9
    with pytest.raises(httpx.RemoteProtocolError):
        caller(opened.url, "weights", retries=2)
    assert len(opened.calls) == 3
    opened.faults["GET /weights"] = [answer(503)] * 9
    with pytest.raises(UpdateError, match="HTTP 503"):
        caller(opened.url, "weights", retries=0)
    assert len(opened.calls) == 4


def test_retries_end_with_the_timeout(caller: Caller, opened: Server) -> None:
    opened.faults["GET /weights"] = [answer(503)] * 1000
    start = time.monotonic()
    with pytest.raises(UpdateError, match="HTTP 503"):
        caller(opened.url, "weights", retries=1000, timeout=1)
    assert time.monotonic() - start < 10
    assert len(opened.calls) > 1


def test_a_busy_chunk_is_waited_for_and_not_counted(caller: Caller, opened: Server) -> None:
    opened.faults[CHUNK] = [answer(409, kind="chunk-busy")] * 4
    make(caller, opened, PUT, retries=0)
    assert len(opened.calls) == 5
    assert opened.chunks["u1"]["0"] == BODY


def test_a_body_for_which_this_side_had_no_time_is_sent_again(caller: Caller, opened: Server) -> None:
    opened.faults[CHUNK] = [answer(408, kind="upload-stalled")]
    make(caller, opened, PUT)
    assert len(opened.calls) == 2
    assert opened.chunks["u1"]["0"] == BODY


@pytest.mark.parametrize("status", [500, 503])
def test_a_problem_of_somebody_else_is_none_of_this_api(caller: Caller, opened: Server, status: int) -> None:
    """A proxy's says nothing about what the server did."""
    problem = b'{"type": "about:blank", "title": "unavailable", "detail": "no upstream"}'
    opened.faults["GET /weights"] = [answer(status, problem)] * 2
    with pytest.raises(UpdateError, match="no upstream") as caught:
        caller(opened.url, "weights", retries=1)
    assert (caught.value.kind, caught.value.status) == ("http", status)
    assert len(opened.calls) == (2 if status == 503 else 1)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://me:TOPSECRT@a", "expected no password beside a key, or the same"),
        ("https://me@a:8000/", "found a user alone"),
        ("HTTP://me:@a/b", "found a user alone"),
        ("ftp://me:TOPSECRT@a", "expected the server's root, such as .*, found ftp://a"),
        ("http://me:a/TOPSECRT@a:8000", "/ in a password is written %2F"),
        ("me:TOPSECRT@a:8000", "expected the server's root, such as .*, found a:8000"),
    ],
)
def test_a_url_that_can_not_be_is_refused_without_its_password(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Endpoint.of(url, "key", timeout=1.0, retries=0)
    assert "TOPSECRT" not in str(caught.value)


def test_a_key_in_a_url_is_sent_and_never_shown(opened: Server) -> None:
    """Trainers take URLs alone, and put them into their logs and errors."""
    endpoint = Endpoint.of("http://x:TOP%2FSECRT@a:1/b/", None, timeout=1.0, retries=0)
    assert (endpoint.url, endpoint.key) == ("http://a:1/b", "TOP/SECRT")
    assert "SECRT" not in repr(endpoint)
    assert Endpoint.of("http://x:same@a", "same", timeout=1.0, retries=0).key == "same"
    opened.faults["GET /weights"] = [answer(500, b"no")]
    url = opened.url.replace("://", "://x:TOPSECRT@")
    with (
        Client(url, retries=0, transport=httpx.HTTPTransport()) as client,
        pytest.raises(UpdateError, match="500") as caught,
    ):
        client.weights()
    assert "TOPSECRT" not in str(caught.value)
    assert Endpoint.of("http://a:1/x@y", "key", timeout=1.0, retries=0).url == "http://a:1/x@y"


def test_no_key_is_shown_with_a_request() -> None:
    """Tools that print what was in the frames of an error would tell it."""
    endpoint = Endpoint.of("http://a", "TOPSECRT", timeout=1.0, retries=0)
    request = endpoint.request("GET", "/weights")
    assert request.headers["Authorization"] == "Bearer TOPSECRT"
    assert "TOPSECRT" not in repr((endpoint, request))


def test_an_iterator_is_not_sent_again_for_a_busy_chunk(caller: Caller, opened: Server) -> None:
    opened.faults[CHUNK] = [answer(409, kind="chunk-busy")]
    with pytest.raises(UpdateError, match="chunk-busy"):
        make(caller, opened, ONE_SHOT)
    assert len(opened.calls) == 1


def test_a_call_that_takes_long_fails_unless_it_may(caller: Caller, opened: Server) -> None:
    commit = "POST /updates/*/commit"
    opened.faults[commit] = [slow(0.6)]
    with pytest.raises(httpx.ReadTimeout):
        caller(opened.url, "commit", "u1", timeout=0.2)
    opened.faults[commit] = [slow(0.6)]
    assert caller(opened.url, "commit", "u1", timeout=0.2, wait_seconds=20.0).state == "committed"


def test_pauses_grow_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "FIRST_SECONDS", 0.25)
    for n, longest in enumerate([0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]):
        drawn = [repeat.backoff(n) for _ in range(50)]
        assert longest / 2 <= min(drawn) < max(drawn) <= longest
    assert repeat.backoff(2000) <= 15.0


def test_a_proxy_that_makes_no_connection_is_asked_again(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is busy for a moment: nothing has reached the server."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(4096).split(b"\r\n")[0])
                    connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(httpx.ProxyError):
            caller("https://rollout:8000", "weights", retries=2)
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    assert asked == [b"CONNECT rollout:8000 HTTP/1.1"] * 3
