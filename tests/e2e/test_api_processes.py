# SPDX-License-Identifier: Apache-2.0
"""A server of two API processes on one engine: every route by each of them, and how they end together.

Each client here has one connection, and so one process that answers it.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import MODEL
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.shared_memory import FOLDER

from .ask import Stream
from .fault_cells import GRACE_SECONDS, FaultyServer, require_nothing_left

SHUTDOWN_SECONDS = 20
DEADLINE_SECONDS = 120.0
CONNECTIONS = 64
"""Most connections that are opened until both processes have taken one."""
LATE_FILE = LATE / "model.safetensors"
pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(1200)]


class TwoProcesses(FaultyServer):
    """A server of two API processes."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        more = ("--shutdown-timeout", str(SHUTDOWN_SECONDS))
        super().__init__(folder, ranks, False, *more, processes=2, deadline_seconds=DEADLINE_SECONDS)


class Process:
    """One API process of a server, by a connection to it. `client`: of its weight-update routes.

    The server closes the connection after a chunk. What follows may reach the other process.
    """

    def __init__(self, server: FaultyServer) -> None:
        self._server = server
        self._connect()
        self.pid = self._find()

    def close(self) -> None:
        """Close the connection."""
        self.client.close()
        self.http.close()

    def _connect(self) -> None:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        transport = httpx.HTTPTransport(limits=limits)
        self.client = Client(self._server.url, self._server.key, transport=transport)
        self.http = httpx.Client(base_url=self._server.url, transport=transport, timeout=120)

    def put_chunk(self, id: str, n: int, body: bytes) -> None:
        """Send a chunk to this process."""
        self.client.put_chunk(id, n, body)
        self.close()
        with ExitStack() as elsewhere:  # held meanwhile: the process with the fewest takes the next
            for _ in range(CONNECTIONS):
                self._connect()
                if self._find() == self.pid:
                    return
                elsewhere.callback(self.client.close)
                elsewhere.callback(self.http.close)
        raise AssertionError(f"{CONNECTIONS} connections did not reach process {self.pid}")

    def _find(self) -> int:
        """Return the process that has the connection."""
        stream = self.http.get("/health").extensions["network_stream"]
        port = stream.get_extra_info("socket").getsockname()[1]
        for process in psutil.Process(self._server.process.pid).children(recursive=True):
            for connection in process.net_connections("tcp"):
                if connection.raddr and connection.raddr.port == port:
                    return process.pid
        raise AssertionError("no process of the server has this connection")

    def complete(self, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": "12+34=", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        reply = self.http.post("/v1/completions", json={**body, "return_token_ids": True, **more})
        choice: dict[str, Any] = reply.raise_for_status().json()["choices"][0]
        return choice

    def metrics(self, name: str) -> list[str]:
        """Lines of a metric of ours."""
        lines = self.http.get("/metrics").raise_for_status().text.splitlines()
        return [line for line in lines if line.startswith(f"fp8ext:{name}")]


Both = Callable[[FaultyServer], tuple[Process, Process]]


@pytest.fixture
def both() -> Iterator[Both]:
    """Finds the two API processes of a server."""
    opened: list[Process] = []

    def find(server: FaultyServer) -> tuple[Process, Process]:
        processes: dict[int, Process] = {}
        while len(processes) < 2:
            assert len(opened) < CONNECTIONS, f"{len(opened)} connections reached processes {list(processes)}"
            opened.append(Process(server))
            processes.setdefault(opened[-1].pid, opened[-1])
        one, other = processes.values()
        return one, other

    yield find
    for process in opened:
        process.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoProcesses]:
    with ExitStack() as stack:
        server = stack.enter_context(TwoProcesses(tmp_path_factory.mktemp("two")))
        server.wait()
        yield server


@pytest.fixture
def server(running: TwoProcesses) -> TwoProcesses:
    """The server, with the early checkpoint and no update open."""
    running.fault.unlink(missing_ok=True)
    with running.client() as client:
        weights = client.weights()
        if weights.update:
            client.abandon(weights.update)
        if weights.version != "early" or weights.state == "poisoned":
            client.push(EARLY, version="early")
    return running


def halves() -> tuple[bytes, bytes]:
    """The late checkpoint as two bodies."""
    tensors = load_file(LATE_FILE)
    names = sorted(tensors)
    return save({name: tensors[name] for name in names[::2]}), save(
        {name: tensors[name] for name in names[1::2]}
    )


def test_an_update_by_both_processes(server: TwoProcesses, both: Both) -> None:
    """Opened, sent, prepared, committed and taken back by turns; both tell the same at once."""
    one, other = both(server)
    before = one.client.digests()
    epoch = one.client.weights().epoch
    update = one.client.open(version="late")
    assert other.client.open(version="late", id=update.id).max_chunk_bytes == update.max_chunk_bytes
    with pytest.raises(UpdateError) as refused:
        other.client.open(version="another")
    assert refused.value.kind == "update-open"
    bodies = halves()
    one.put_chunk(update.id, 0, bodies[0])
    other.put_chunk(update.id, 1, bodies[1])
    one.client.prepare(update.id)
    done = other.client.commit(update.id)
    assert one.client.commit(update.id) == done
    for process in (one, other):
        weights = process.client.weights()
        assert (weights.version, weights.epoch) == ("late", epoch + 1)
        [span] = process.complete()["weight_versions"]
        assert (span["epoch"], span["version"]) == (epoch + 1, "late")
        assert process.metrics("epoch ") == [f"fp8ext:epoch {epoch + 1:.1f}"]
        assert process.client.verify().version == "late"
    assert one.client.digests() == other.client.digests() != before
    one.client.rollback()
    assert other.client.weights().version == "early"
    assert other.metrics("epoch ") == [f"fp8ext:epoch {epoch + 2:.1f}"]
    assert other.client.digests().digests == before.digests


def test_uploads_have_one_room_between_them(server: TwoProcesses, both: Both) -> None:
    """Each process has a half of it, in a file of its own, which its end removes."""
    ours = _spools(*both(server))
    sizes = [path.stat().st_size for path in ours]
    with server.client() as client:
        update = client.open()
        client.abandon(update.id)
    assert min(sizes) == update.max_chunk_bytes
    assert sum(sizes) <= 4 << 30


def test_logprobs_by_both_processes(server: TwoProcesses, both: Both) -> None:
    """The engine packs them for its clients; each process unpacks them."""
    one, other = both(server)
    for more in ({"logprobs": 0}, {"logprobs": 3}, {"logprobs": 1, "prompt_logprobs": 2}):
        answers = [process.complete(max_tokens=40, **more) for process in (one, other)]
        assert answers[0] == answers[1]
        assert len(answers[0]["logprobs"]["token_logprobs"]) == 40


def test_refusals_of_both_are_counted_once(server: TwoProcesses, both: Both) -> None:
    one, other = both(server)
    line = 'refusals_total{kind="wrong-key"}'
    [before] = one.metrics(line) or [f"fp8ext:{line} 0.0"]
    for process in (one, one, other):
        answer = process.http.get("/fp8ext/v1/weights", headers={"Authorization": "Bearer wrong"})
        assert answer.status_code == 403
    expected = float(before.split()[-1]) + 3
    for process in (one, other):
        [told] = process.metrics(line)
        assert float(told.split()[-1]) == expected
        assert len(process.metrics('updates_total{outcome="committed"}')) == 1


@pytest.mark.parametrize("refused", [True, False], ids=["that waits in vain", "that goes through"])
def test_a_commit_that_both_are_asked_for(server: TwoProcesses, both: Both, refused: bool) -> None:
    """It is one commit: both get its outcome, though the second began to wait later."""
    one, other = both(server)
    epoch = one.client.weights().epoch
    update = one.client.open(version="late", running="wait", wait_seconds=3.0 if refused else 60.0)
    one.put_chunk(update.id, 0, LATE_FILE.read_bytes())
    one.client.prepare(update.id)
    slow = {"point": "step", "kind": "slow", "rank": 0, "lasting": True, "seconds": 0.05}
    server.fault.write_text(json.dumps(slow))
    stream = Stream(server, tokens=1900 if refused else 60)

    def commit(process: Process) -> Any:
        try:
            return process.client.commit(update.id)
        except UpdateError as error:
            return error.kind

    with ThreadPoolExecutor() as pool:
        begun = time.monotonic()
        first = pool.submit(commit, one)
        time.sleep(1.5)  # a wait of its own would end so much later
        second = pool.submit(commit, other)
        outcomes = first.result(), second.result()
        seconds = time.monotonic() - begun
    server.fault.unlink()
    assert outcomes[0] == outcomes[1]
    if refused:
        assert outcomes[0] == "wait-timeout"
        assert seconds < 4.5, "the second one waited by itself"
    else:
        assert outcomes[0].result["epoch"] == epoch + 1
    assert other.client.weights().epoch == epoch + (not refused)
    stream.wait()
    assert stream.finish == "length"


def wait_for_health(process: Any, status: int) -> None:
    """What the engine tells all processes reaches one of them some milliseconds after another's answer."""
    end = time.monotonic() + 60
    while process.http.get("/health").status_code != status and time.monotonic() < end:
        time.sleep(0.01)
    assert process.http.get("/health").status_code == status


def test_both_know_of_a_poisoned_engine_and_of_its_healing(server: TwoProcesses, both: Both) -> None:
    one, other = both(server)
    update = one.client.open(version="late")
    one.put_chunk(update.id, 0, LATE_FILE.read_bytes())
    one.client.prepare(update.id)
    fault = {"point": "exchange", "kind": "exception", "rank": 0, "lasting": True}
    server.fault.write_text(json.dumps(fault))
    with pytest.raises(UpdateError) as caught:
        one.client.commit(update.id)
    assert caught.value.kind == "poisoned"
    for process in (other, one):
        wait_for_health(process, 503)
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
            answer = process.http.request(method, path, json={})
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:fp8ext:problem:poisoned")
        assert process.metrics("poisoned ") == ["fp8ext:poisoned 1.0"]
        assert process.client.weights().state == "poisoned"
    server.fault.unlink()
    other.client.abandon(update.id)
    other.client.push(LATE, version="late")
    for process in (one, other):
        wait_for_health(process, 200)
        assert process.metrics("poisoned ") == ["fp8ext:poisoned 0.0"]
        assert process.complete()["token_ids"]


def test_an_upload_to_one_ends_when_the_other_gives_the_update_up(server: TwoProcesses, both: Both) -> None:
    one, other = both(server)
    update = one.client.open(version="late")
    body, may_go_on, began = LATE_FILE.read_bytes(), threading.Event(), threading.Event()

    def pieces() -> Iterator[bytes]:
        yield body[: 1 << 16]
        began.set()
        may_go_on.wait(300)
        yield body[1 << 16 :]

    def send() -> int:
        headers = {"Authorization": f"Bearer {server.key}", "Content-Length": str(len(body))}
        url = f"/fp8ext/v1/updates/{update.id}/chunks/0"
        return other.http.put(url, content=pieces(), headers=headers).status_code

    with ThreadPoolExecutor() as pool:
        sending = pool.submit(send)
        assert began.wait(60)
        one.client.abandon(update.id)
        may_go_on.set()
        assert sending.result(60) in (404, 409, 410)


def test_a_server_one_of_whose_processes_is_killed_ends(
    tmp_path: Path, both: Both, ended: Callable[[int], bool]
) -> None:
    with TwoProcesses(tmp_path, 2) as server:
        server.wait()
        one, other = both(server)
        other.client.push(LATE, version="late")  # ranks have mapped its room
        spools = _spools(one, other)
        children = psutil.Process(server.process.pid).children(recursive=True)
        os.kill(one.pid, signal.SIGKILL)
        assert server.process.wait(GRACE_SECONDS + SHUTDOWN_SECONDS) == 70
        assert all(ended(child.pid) for child in children)
        require_nothing_left(server)
        assert not any(path.exists() for path in spools)
        assert "so this server ends with 70" in server.log.read_text(errors="replace")


def _spools(*processes: Process) -> list[Path]:
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes]
    found = [path for path in Path(FOLDER).glob("fp8ext-*.spool") if any(str(path) in told for told in maps)]
    assert len(found) == len(processes)
    return found


def test_processes_end_with_their_launcher(tmp_path: Path, both: Both, ended: Callable[[int], bool]) -> None:
    with TwoProcesses(tmp_path) as server:
        server.wait()
        spools = _spools(*both(server))
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        assert all(ended(child.pid) for child in children)
        assert not any(path.exists() for path in spools)


def test_running_requests_are_answered_when_the_server_is_told_to_end(
    server: TwoProcesses, both: Both
) -> None:
    """Those that end in time as ever, each of the others with an error, at both processes. It ends this file's server."""
    spools = _spools(*both(server))
    slow = {"point": "step", "kind": "slow", "rank": 0, "lasting": True, "seconds": 0.05}
    server.fault.write_text(json.dumps(slow))
    long = [Stream(server, tokens=1900) for _ in range(4)]
    short = [Stream(server, tokens=30) for _ in range(4)]
    os.kill(server.process.pid, signal.SIGTERM)
    seconds = SHUTDOWN_SECONDS + GRACE_SECONDS
    for stream in short:
        stream.wait(seconds)
        assert (stream.finish, len(stream.token_ids)) == ("length", 30)
    for stream in long:
        stream.wait(seconds)
        assert "error" in (stream.finish or "").lower(), stream.finish
    assert server.process.wait(seconds) == 0
    require_nothing_left(server)
    assert not any(path.exists() for path in spools)
