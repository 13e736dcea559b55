# SPDX-License-Identifier: Apache-2.0
"""Servers of two engine cores (`--data-parallel-size 2`), updated as one: all cores or none, at the same epoch.

The cores of a mixture of experts share out experts and step together. Those of a dense model know nothing of each other.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save

from vllm_fp8ext.demo.server import MODEL, Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .ask import metrics
from .fault_cells import DATA_PARALLEL_CELLS, DEAD, PATIENT_SECONDS, Cell, FaultyServer, run
from .native_trainer import Trainer

CORES = (0, 1)
IN_ORDER = sorted(DATA_PARALLEL_CELLS, key=lambda cell: (cell.expected == DEAD, cell.kind == "hang"))
REPRESENTATIVES = {
    Cell("exception", "commit", 1, experts=True, cores=2),
    Cell("exception", "commit", 1, True, experts=True, cores=2),
    Cell("kill -9", "commit", 1, experts=True, cores=2),
}
"""Cells that `make test` has. The last ends the server."""
BOTH = pytest.mark.parametrize("server", [pytest.param(False, marks=pytest.mark.full), True], indirect=True)
"""The server of the dense model, and that of the mixture of experts."""
SLOW_SECONDS = 2.0
Key = tuple[bool, float]
pytestmark = [pytest.mark.alone, pytest.mark.timeout(1800)]


def complete(server: Server, core: int, tokens: int = 8, **more: Any) -> dict[str, Any]:
    """One greedy completion of a core."""
    body = {"model": MODEL, "prompt": "12+34=", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(
        f"{server.url}/v1/completions",
        json={**body, "return_token_ids": True, **more},
        headers={"X-data-parallel-rank": str(core)},
        timeout=300,
    )
    choice: dict[str, Any] = reply.raise_for_status().json()["choices"][0]
    return choice


def spans(choice: dict[str, Any]) -> list[tuple[int, str]]:
    """Epochs and versions of an answer."""
    return [(span["epoch"], span["version"]) for span in choice["weight_versions"]]


def served(server: Server) -> list[Any]:
    """Tokens and versions of each core, and its digests."""
    with server.client() as client:
        digests = client.digests().model_dump()
    answers = [complete(server, core) for core in CORES]
    return [digests, *((answer["token_ids"], spans(answer)) for answer in answers)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Key], FaultyServer]]:
    """A server, by whether it has experts and by its deadline; started again when it has ended."""
    folder = tmp_path_factory.mktemp("cores")
    servers: dict[Key, FaultyServer] = {}

    def running(key: Key) -> FaultyServer:
        server = servers.get(key)
        if server is None or server.process.poll() is not None:
            experts, deadline = key
            server = FaultyServer(folder, 1, experts, cores=2, deadline_seconds=deadline)
            servers[key] = stack.enter_context(server)
            server.wait(600)
        return server

    with ExitStack() as stack:
        yield running


@pytest.fixture
def server(request: pytest.FixtureRequest, started: Callable[[Key], FaultyServer]) -> FaultyServer:
    """The server, with the early checkpoint and no update open."""
    server = started((request.param, PATIENT_SECONDS))
    server.fault.unlink(missing_ok=True)
    with server.client() as client:
        weights = client.weights()
        if weights.update:
            client.abandon(weights.update)
        if weights.version != "early":
            client.push(server.early, version="early")
    return server


@BOTH
@pytest.mark.parametrize("busy", [pytest.param(0, marks=pytest.mark.full), 1])
def test_both_cores_serve_an_update_at_once(server: FaultyServer, busy: int) -> None:
    """One has a request, the other one is idle."""
    with server.client() as client, ThreadPoolExecutor() as pool:
        manifest = Manifest.from_dict(client.manifest())
        assert manifest.world_size == 2
        before = client.weights().epoch
        request = pool.submit(complete, server, busy, 400)
        update = client.open(version="late")
        body = (server.late / "model.safetensors").read_bytes()
        client.put_chunk(update.id, 0, body, len(body))
        client.prepare(update.id)
        assert client.commit(update.id).result["epoch"] == before + 1
        for core in CORES:
            assert spans(complete(server, core)) == [(before + 1, "late")]
        assert spans(request.result()) in (
            [(before, "early"), (before + 1, "late")],
            [(before, "early")],
            [(before + 1, "late")],
        )
        assert client.digests().digests == checkpoint_digests(server.late, manifest)
        assert client.verify().ranks == 2
        rolled_back = client.rollback()
        assert (rolled_back.epoch, rolled_back.version) == (before + 2, "early")
        for core in CORES:
            assert spans(complete(server, core)) == [(before + 2, "early")]
        assert client.digests().digests == checkpoint_digests(server.early, manifest)
    assert set(metrics(server, "fp8ext:epoch").values()) == {before + 2}


@pytest.mark.full
@BOTH
def test_a_request_goes_on_under_the_new_weights(server: FaultyServer) -> None:
    with server.client() as client, ThreadPoolExecutor() as pool:
        before = client.weights().epoch
        for attempt in range(8):
            request = pool.submit(complete, server, 1, 600)
            client.push((server.early, server.late)[attempt % 2], version=f"step-{attempt}")
            versions = spans(request.result())
            if len(versions) == 2:
                assert versions[1][0] == versions[0][0] + 1 > before
                return
    raise AssertionError(f"no commit met a request: {versions}")


@BOTH
@pytest.mark.parametrize("idle", [0, pytest.param(1, marks=pytest.mark.full)])
def test_requests_that_come_while_all_cores_stand_still_wait(server: FaultyServer, idle: int) -> None:
    """vLLM wakes the other ranks for a request that comes to one, and they would wait for one that is stopped."""
    fault = {"point": "exchange", "kind": "slow", "rank": 1, "lasting": False, "seconds": SLOW_SECONDS}
    with server.client() as client, ThreadPoolExecutor() as pool:
        update = client.open(version="late")
        body = (server.late / "model.safetensors").read_bytes()
        client.put_chunk(update.id, 0, body, len(body))
        client.prepare(update.id)
        before = client.weights().epoch
        server.fault.write_text(json.dumps(fault))
        commit = pool.submit(client.commit, update.id)
        while server.fault.exists():
            time.sleep(0.01)
        requests = [pool.submit(complete, server, 1 - idle) for _ in range(3)]
        assert commit.result().result["epoch"] == before + 1
        assert [spans(request.result()) for request in requests] == [[(before + 1, "late")]] * 3
        assert spans(complete(server, idle)) == [(before + 1, "late")]


@BOTH
@pytest.mark.parametrize(
    "how", ["recompute", *(pytest.param(how, marks=pytest.mark.full) for how in ("wait", "abort"))]
)
def test_requests_of_every_core_are_treated_as_asked(server: FaultyServer, how: str) -> None:
    with server.client() as client, ThreadPoolExecutor() as pool:
        before = client.weights().epoch
        requests = [pool.submit(complete, server, core, 400) for core in CORES]
        time.sleep(0.5)
        client.push(server.late, version="late", running=how)
        answers = [request.result() for request in requests]
        assert [spans(complete(server, core)) for core in CORES] == [[(before + 1, "late")]] * 2
    for answer in answers:
        if how == "wait":
            assert len(spans(answer)) == 1
        if how != "abort":
            assert len(answer["token_ids"]) == 400


@BOTH
def test_what_is_refused_changes_no_core(server: FaultyServer) -> None:
    tensors = load_file(server.late / "model.safetensors")
    before = served(server)
    tensors["model.norm.weight"][3] = float("nan")
    body = save(tensors)
    with server.client() as client:
        update = client.open(version="late")
        with pytest.raises(UpdateError) as refused:
            client.put_chunk(update.id, 0, body, len(body))
        assert refused.value.details["problems"][0]["kind"] == "non-finite"
        with pytest.raises(UpdateError) as incomplete:
            client.commit(update.id)
        assert incomplete.value.kind == "incomplete"
        client.abandon(update.id)
    assert served(server) == before


@pytest.mark.full
@BOTH
def test_an_update_stays_away_from_a_pause(server: FaultyServer) -> None:
    """A pause of vLLM lasts on every core."""
    headers = {"Authorization": f"Bearer {server.key}"}
    httpx.post(f"{server.url}/pause?mode=keep", headers=headers, timeout=120).raise_for_status()
    with server.client() as client:
        try:
            with pytest.raises(UpdateError) as paused:
                client.push(server.late, version="late")
            assert paused.value.kind == "paused"
        finally:
            httpx.post(f"{server.url}/resume", headers=headers, timeout=120).raise_for_status()
        client.push(server.late, version="late")
    assert [spans(complete(server, core))[0][1] for core in CORES] == ["late"] * 2


@pytest.mark.full
@BOTH
def test_vllms_own_transfer_reaches_both_cores(server: FaultyServer) -> None:
    with Trainer(server) as trainer:
        trainer.init()
        trainer.push(load_file(server.late / "model.safetensors"), version="late")
        with server.client() as client:
            manifest = Manifest.from_dict(client.manifest())
            assert client.digests().digests == checkpoint_digests(server.late, manifest)
        assert [spans(complete(server, core))[0][1] for core in CORES] == ["late"] * 2


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=[] if cell in REPRESENTATIVES else pytest.mark.full)
        for cell in IN_ORDER
    ],
)
def test_faults(started: Callable[[Key], FaultyServer], cell: Cell) -> None:
    """A fault on core 1 leaves both as they were, or poisons both, or ends the server."""
    deadline = cell.deadline_seconds if cell.kind == "hang" else PATIENT_SECONDS
    run(started((cell.experts, deadline)), cell)
