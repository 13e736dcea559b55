# SPDX-License-Identifier: Apache-2.0
"""Bodies that are read past uvicorn arrive as others do: whole, or refused for what is wrong with them."""

import asyncio
import base64
import hashlib
import json
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.connection import Connection
from vllm_fp8ext.serve.content_digest import ContentDigest
from vllm_fp8ext.serve.spool import Spool

LIMIT = 32 << 20
PATIENT_SECONDS = 60.0
"""How long servers here wait for more of a body: a machine may be busy elsewhere for seconds."""
IDLE_SECONDS = 2.0
"""How long they wait where the body of a test stops coming."""
BODY = os.urandom(1 << 20) * 24


@dataclass
class Answer:
    """`told`: the JSON, after the status. `connection`: the header."""

    told: tuple[int, Any]
    connection: str | None


@dataclass
class Served:
    """A server whose route takes bodies as ours does. `handed`: how many bytes of each uvicorn handed over. `answers`: the
    status of each. `delay`: seconds between the arrival of a body's first bytes and their being looked at."""

    port: int
    spool: Spool
    handed: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    delay: float = 0.0
    tasks: list[Any] = field(default_factory=list)
    loop: Any = None

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Bodies that begin meanwhile are given up after `IDLE_SECONDS`."""
        self.spool._idle_seconds = IDLE_SECONDS
        try:
            yield
        finally:
            self.spool._idle_seconds = PATIENT_SECONDS

    def put(self, body: Any, length: int | None = None, digest: str | None = None) -> Answer:
        """Send a body on a connection of its own."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            return put(connection, body, length, digest)


def put(
    connection: HTTPConnection,
    body: Any,
    length: int | None = None,
    digest: str | None = None,
    scheme: str | None = None,
) -> Answer:
    """`scheme`: by which a proxy says that the request came to it."""
    headers = {"Content-Length": str(len(body) if length is None else length)}
    if scheme is not None:
        headers["X-Forwarded-Proto"] = scheme
    connection.request("PUT", "/", body, headers | ({"Content-Digest": digest} if digest else {}))
    answer = connection.getresponse()
    return Answer((answer.status, json.loads(answer.read())), answer.getheader("Connection"))


def taken(body: bytes) -> tuple[int, dict[str, Any]]:
    return 200, {"sha256": hashlib.sha256(body).hexdigest()}


def digest_of(body: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


@contextmanager
def serving(folder: Path, loop: Any = "auto", **options: Any) -> Iterator[Served]:
    spool = Spool(str(folder), LIMIT, PATIENT_SECONDS)

    async def pieces(request: Request) -> AsyncIterator[bytes]:
        state.handed.append(0)
        at = len(state.handed) - 1
        try:
            async for piece in request.stream():
                await asyncio.sleep(state.delay)
                state.handed[at] += len(piece)
                yield piece
        except ClientDisconnect:
            raise UpdateError("truncated", "the client went away", status=400) from None

    async def application(scope: Any, receive: Any, send: Any) -> None:
        state.loop = asyncio.get_running_loop()
        state.tasks.append(asyncio.current_task())
        request = Request(scope, receive)
        digest = ContentDigest.parse(request.headers.get("content-digest"))
        length = request.headers.get("content-length")
        connection = Connection.of(scope, receive)
        try:
            async with spool.receive(
                pieces(request), int(length) if length else None, digest, connection
            ) as extent:
                answer = JSONResponse({"sha256": hashlib.sha256(extent.content).hexdigest()})
        except UpdateError as error:
            answer = JSONResponse({"kind": error.kind, "detail": str(error)}, error.status)
        state.answers.append(answer.status_code)
        await answer(scope, receive, send)

    listening = socket.create_server(("127.0.0.1", 0))
    state = Served(listening.getsockname()[1], spool)
    config = uvicorn.Config(application, log_level="warning", lifespan="off", loop=loop, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield state
    finally:
        server.should_exit = True
        thread.join()
        spool.close()


LOOPS = ["uvloop", "asyncio"]


@pytest.fixture(scope="module", params=LOOPS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("spool"), request.param) as server:
        yield server


@pytest.fixture(autouse=True)
def everything_is_free_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        _require_free(request.getfixturevalue("served"))


def _require_free(served: Served) -> None:
    body = bytes(LIMIT)
    assert served.put(body).told == taken(body)


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 16, (1 << 20) + 1, len(BODY)])
@pytest.mark.parametrize("checked", [False, True])
def test_a_body_arrives_whole(served: Served, size: int, checked: bool) -> None:
    body = BODY[:size]
    assert served.put(body, digest=digest_of(body) if checked else None).told == taken(body)


def test_of_a_long_body_uvicorn_hands_over_the_beginning_alone(served: Served) -> None:
    assert served.put(BODY).connection == "close"
    assert served.handed[-1] <= 1 << 20


def test_a_connection_is_kept_after_a_body_that_was_there_at_once(served: Served) -> None:
    with closing(HTTPConnection("127.0.0.1", served.port, timeout=120)) as connection:
        for body in (b"abc", b"defg"):
            answer = put(connection, body)
            assert (answer.told, answer.connection) == (taken(body), None)


def test_bodies_that_come_slowly_and_together(served: Served) -> None:
    """Of sizes that no step is a multiple of."""

    def slowly(body: bytes) -> Iterator[bytes]:
        for start in range(0, len(body), 300_001):
            yield body[start : start + 300_001]
            time.sleep(0.001)

    bodies = [BODY[start : start + 5_000_003] for start in range(8)]

    def send(body: bytes) -> Any:
        return served.put(slowly(body), len(body), digest_of(body)).told

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(send, bodies)) == [taken(body) for body in bodies]


def test_what_uvicorn_has_read_meanwhile_is_not_lost(served: Served) -> None:
    def slowly() -> Iterator[bytes]:
        for start, stop in ((0, 10), (10, 50_000), (50_000, len(BODY))):
            yield BODY[start:stop]
            time.sleep(served.delay / 4)

    served.delay = 0.2
    try:
        assert served.put(slowly(), len(BODY), digest_of(BODY)).told == taken(BODY)
    finally:
        served.delay = 0.0


def test_a_client_that_waits_to_be_asked(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), 30) as client:
        head = f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\nExpect: 100-continue\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 100")
        client.sendall(BODY)
        assert taken(BODY)[1]["sha256"].encode() in client.makefile("rb").read()


def test_another_digest_is_found(served: Served) -> None:
    other = BODY[:-1] + bytes([BODY[-1] ^ 1])
    status, told = served.put(other, digest=digest_of(BODY)).told
    assert (status, told["kind"]) == (400, "digest-mismatch")


@pytest.mark.parametrize("sent", [0, 10, 1 << 20, len(BODY) - 1])
def test_a_body_that_stops_coming_is_given_up(served: Served, sent: int) -> None:
    def stops() -> Iterator[bytes]:
        yield BODY[:sent]

    with served.impatient():
        status, told = served.put(stops(), len(BODY)).told
    assert (status, told["kind"]) == (408, "upload-stalled")
    assert f"after {sent} of {len(BODY)} bytes" in told["detail"]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("sent", [0, 10, 1 << 20, len(BODY) - 1])
def test_a_client_that_goes_away_leaves_nothing(served: Served, sent: int, reset: bool) -> None:
    """That all of the room can be had again is looked at after each test."""
    before = len(served.answers)
    with socket.create_connection(("127.0.0.1", served.port), 30) as client:
        client.sendall(f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode())
        client.sendall(BODY[:sent])
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    _eventually(lambda: len(served.answers) > before)
    assert served.answers[-1] == 400


def _eventually(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_cancelled_request_ends_its_reading(tmp_path: Path, loop: str) -> None:
    """Long before it would have waited long enough for more."""
    with (
        serving(tmp_path, loop) as served,
        socket.create_connection(("127.0.0.1", served.port), 120) as client,
    ):
        client.sendall(f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode())
        client.sendall(BODY[: 1 << 20])
        _eventually(lambda: sum(served.handed) > 0)
        time.sleep(0.1)  # until it waits for more
        served.loop.call_soon_threadsafe(served.tasks[-1].cancel)
        assert client.makefile("rb").read().startswith(b"HTTP/1.1 500")
        _require_free(served)


@pytest.mark.parametrize("how", ["again", "reset"])
def test_a_cancelled_request_waits_until_nothing_writes(tmp_path: Path, how: str) -> None:
    """Also when it is cancelled again, or its client has gone: else its place would be another body's already."""
    ends: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        writing = asyncio.Event()

        def took(count: int) -> None:
            loop.call_soon_threadsafe(writing.set)
            time.sleep(0.3)
            ends.append("thread")

        ours, client = socket.socketpair()
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
        transport.pause_reading()
        connection = Connection(SimpleNamespace(transport=transport))
        with closing(client), closing(transport):
            client.sendall(b"x" * 100_000)
            reading = asyncio.create_task(connection.read_into(memoryview(bytearray(1 << 20)), 10, took))
            await asyncio.wait_for(writing.wait(), 10)
            if how == "reset":
                client.close()
            for _ in range(3 if how == "again" else 1):
                reading.cancel()
                await asyncio.sleep(0.02)
            with pytest.raises(asyncio.CancelledError):
                await reading
        ends.append("task")

    asyncio.run(main())
    assert ends[-1] == "task"
    assert ends.count("thread") == len(ends) - 1 > 0


def test_bodies_that_stall_do_not_hold_up_others(served: Served) -> None:
    count = 2 * len(os.sched_getaffinity(0)) + 30
    before = len(served.answers)
    with ExitStack() as stack:
        stack.enter_context(served.impatient())
        stalled = [
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 30))
            for _ in range(count)
        ]
        for client in stalled:
            client.sendall(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 8192\r\n\r\nx")
        assert served.put(BODY[: 5 << 20]).told == taken(BODY[: 5 << 20])
        assert served.answers[before:] == [200], "it came first"
        for client in stalled:
            assert client.makefile("rb").read().startswith(b"HTTP/1.1 408")


def test_chunks_of_http_are_not_taken_for_the_body(served: Served) -> None:
    """Without a length they are refused; with one, by uvicorn."""
    with closing(HTTPConnection("127.0.0.1", served.port, timeout=120)) as connection:
        connection.request("PUT", "/", iter([BODY]), encode_chunked=True)
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["kind"]) == (411, "length-required")


def test_behind_a_proxy_that_ends_tls_bodies_are_read(served: Served) -> None:
    with closing(HTTPConnection("127.0.0.1", served.port, timeout=120)) as connection:
        answer = put(connection, BODY, scheme="https")
    assert (answer.told, answer.connection) == (taken(BODY), "close")


@pytest.mark.parametrize("way", ["h11", "tls"])
def test_where_a_connection_cannot_be_read_uvicorn_hands_over_all(tmp_path: Path, way: str) -> None:
    options: dict[str, Any] = {"http": "h11"}
    kind: Any = HTTPConnection
    more: dict[str, Any] = {}
    if way == "tls":
        key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
        make = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=127.0.0.1",
        ]
        names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*make, *names], check=True, capture_output=True)
        options = {"ssl_keyfile": key, "ssl_certfile": certificate}
        kind, more = HTTPSConnection, {"context": ssl.create_default_context(cafile=certificate)}
    folder = tmp_path / "spool"
    folder.mkdir()
    with serving(folder, **options) as served:
        for digest, expected in ((BODY, taken(BODY)), (BODY[1:], None)):
            with closing(kind("127.0.0.1", served.port, timeout=120, **more)) as connection:
                # as of a client of a proxy that encrypts anew
                told = put(connection, BODY, digest=digest_of(digest), scheme="http").told
            assert told == expected if expected else told[1]["kind"] == "digest-mismatch"
        assert served.handed == [len(BODY)] * 2
