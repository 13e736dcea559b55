# SPDX-License-Identifier: Apache-2.0
"""The fault matrix on real servers: cells of each outcome in `make test`, every cell in `make test-all`.

`scripts/fault-matrix` runs them as well, and writes their table.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from vllm_fp8ext.errors import UpdateError

from .ask import Stream, complete
from .fault_cells import (
    CELLS,
    DEAD,
    DEADLINE_SECONDS,
    LOAD_CELLS,
    NATIVE_CELLS,
    PATIENT_SECONDS,
    Cell,
    FaultyServer,
    require_nothing_left,
    run,
)

REPRESENTATIVES = {
    Cell("exception", "chunk", 1, native=True),
    Cell("exception", "between", 1, loads=True),
    Cell("out of memory", "prepare", 1),
    Cell("exception", "verify", 1),
    Cell("exception", "commit", 1, lasting=True),
    Cell("exception", "rollback", 1),
    Cell("kill -9", "staging", 1),
}
"""Cells that `make test` has: on one server. Of two engine cores with experts `test_data_parallel.py` has some."""
IN_ORDER = sorted(
    (*CELLS, *NATIVE_CELLS, *LOAD_CELLS), key=lambda cell: (cell.expected == DEAD, cell.kind == "hang")
)
"""Those that end their server last: the others share one."""
SERVERS = (
    pytest.param((1, False, 1, PATIENT_SECONDS), id="TP 1"),
    pytest.param((2, False, 1, PATIENT_SECONDS), id="TP 2", marks=pytest.mark.full),
    pytest.param((2, True, 1, PATIENT_SECONDS), id="TP 2, experts", marks=pytest.mark.full),
)
IMPATIENT = (
    pytest.param((1, False, 1, DEADLINE_SECONDS), id="TP 1"),
    pytest.param((2, True, 1, 2 * DEADLINE_SECONDS), id="TP 2, experts"),
)
"""Servers whose deadline is waited for."""
LONGER = (1, 4, 16)
"""How much longer it is where other work has the machine, so that it ends a server that begins."""
Key = tuple[int, bool, int, float]
Servers = Callable[[Key], FaultyServer]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A server with the fault plugin, by its ranks, whether it has experts, its API processes, and its deadline: started when
    it is first asked for, and again when it has ended."""
    folder = tmp_path_factory.mktemp("faulty")
    started: dict[Key, FaultyServer] = {}

    def start(key: Key) -> FaultyServer:
        ranks, experts, processes, deadline = key
        for longer in LONGER:
            server = stack.enter_context(
                FaultyServer(folder, ranks, experts, processes=processes, deadline_seconds=longer * deadline)
            )
            try:
                server.wait()
                break
            except RuntimeError:
                if longer == LONGER[-1] or "was not done within" not in server.log.read_text():
                    raise
        return server

    def running(key: Key) -> FaultyServer:
        server = started.get(key)
        if server is None or server.process.poll() is not None:
            started[key] = server = start(key)
        return server

    with ExitStack() as stack:
        yield running


def _flip_a_bit(server: FaultyServer) -> None:
    """Of what the last rank serves, when its fingerprint is taken next."""
    fault = {"point": "verify", "kind": "flipped bit", "rank": server.ranks - 1, "lasting": False}
    server.fault.write_text(json.dumps(fault))


@pytest.mark.parametrize("key", SERVERS)
def test_a_bit_that_flips_is_found(faulty: Servers, key: Key):
    """In weights that an update brought. A rollback does not bring them back unnoticed."""
    server, ranks = faulty(key), key[0]
    with server.client() as client:
        assert client.verify().ranks == ranks
        epoch = client.push(server.late, version="late").result["epoch"]
        assert client.verify().epoch == epoch
        _flip_a_bit(server)
        with pytest.raises(UpdateError) as caught:
            client.verify()
        assert (caught.value.kind, caught.value.details["ranks"]) == ("weights-differ", [ranks - 1])
        assert client.weights().state == "poisoned"
        client.push(server.late, version="late")
        _flip_a_bit(server)
        client.push(server.early, version="early")
        assert client.verify().version == "early"
        with pytest.raises(UpdateError, match="not those that were committed as epoch") as caught:
            client.rollback()
        assert (caught.value.kind, client.weights().state) == ("poisoned", "poisoned")
        client.push(server.early, version="early")
        client.verify()


@pytest.mark.parametrize("key", SERVERS)
def test_a_bit_that_flips_in_the_exchange_is_found_by_the_commit(faulty: Servers, key: Key):
    """Such weights serve nobody for longer than it takes to find out. The update can be sent again: that heals the server."""
    server, ranks = faulty(key), key[0]
    with server.client() as client:
        client.push(server.early, version="early")
        update = client.open(version="late")
        client.put_chunk(update.id, 0, (server.late / "model.safetensors").read_bytes())
        client.prepare(update.id)
        _flip_a_bit(server)
        for error in (("poisoned", 503), ("incomplete", 422)):
            with pytest.raises(UpdateError) as caught:
                client.commit(update.id)
            assert (caught.value.kind, caught.value.status) == error
        found = client.weights()
        assert (found.state, found.version, found.previous_version) == ("poisoned", "late", None)
        assert f"rank {ranks - 1}: the served weights are not those" in found.poisoned
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            complete(server, "12+34=")
        done = client.push(server.late, version="late", id=update.id)
        assert (done.id, done.seconds["verify"] > 0) == (update.id, True)
        assert client.verify().version == "late"
        complete(server, "12+34=")
        client.push(server.early, version="early")


def call(server: FaultyServer, path: str) -> httpx.Response:
    """What a call is answered, once."""
    return httpx.post(
        f"{server.url}/fp8ext/v1{path}",
        json={},
        headers={"Authorization": f"Bearer {server.key}"},
        timeout=server.patience,
    )


@pytest.mark.full
@pytest.mark.parametrize("key", IMPATIENT)
def test_a_step_that_takes_longer_than_the_deadline_ends_nothing(faulty: Servers, key: Key) -> None:
    """Of a busy engine a call is given up; the engine goes on."""
    server = faulty(key)
    seconds = 1.5 * server.deadline
    fault = {"point": "step", "kind": "slow", "rank": 0, "lasting": False, "seconds": seconds}
    with server.client() as client:
        client.push(server.early, version="early")
        stream = Stream(server, tokens=200)
        server.fault.write_text(json.dumps(fault))
        while server.fault.exists():
            assert stream.running
            time.sleep(0.01)
        answer = call(server, "/updates")
        assert (answer.status_code, answer.json()["type"]) == (504, "urn:fp8ext:problem:engine-timeout")
        stream.wait()
        assert (stream.finish, len(stream.token_ids)) == ("length", 200)
        opened = client.weights().update
        assert opened is not None
        client.abandon(opened)
        client.push(server.early, version="early")
        assert server.process.poll() is None


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=() if cell in REPRESENTATIVES else pytest.mark.full, id=str(cell))
        for cell in IN_ORDER
    ],
)
def test_a_cell_ends_as_it_must(faulty: Servers, cell: Cell) -> None:
    run(faulty((cell.ranks, cell.experts, cell.processes, cell.deadline_seconds)), cell)


@pytest.mark.full
@pytest.mark.parametrize("key", IMPATIENT)
def test_an_engine_that_is_stopped_in_a_commit_is_ended(faulty: Servers, key: Key) -> None:
    """Its own watchdog is stopped with it."""
    server = faulty(key)
    fault = {"point": "call to commit", "kind": "stopped", "rank": 0, "lasting": False}
    with server.client() as client:
        update = client.open(version="late")
        client.put_chunk(update.id, 0, (server.late / "model.safetensors").read_bytes())
        client.prepare(update.id)
    stream = Stream(server, tokens=1200)
    server.fault.write_text(json.dumps(fault))
    answer, seconds = call(server, f"/updates/{update.id}/commit"), server.patience
    assert (answer.status_code, answer.json()["type"]) == (504, "urn:fp8ext:problem:engine-timeout")
    stream.wait(seconds)
    assert "error" in (stream.finish or "").lower(), stream.finish
    with contextlib.suppress(httpx.TransportError):  # it has ended
        assert httpx.get(f"{server.url}/health", timeout=seconds).status_code == 503
    assert server.process.wait(seconds) != 0
    require_nothing_left(server)
    assert "nor did it run at all" in server.log.read_text(errors="replace")
