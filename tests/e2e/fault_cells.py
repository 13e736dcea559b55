# SPDX-License-Identifier: Apache-2.0
"""The fault matrix: what is broken, on which server, and how it must end.

Every cell runs on a real server while a completion streams: the fault strikes, every open call is answered, and the server is
either as it was (or heals by a full update) or it has ended, with a non-zero exit code and nothing left behind.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import MODEL, SMALL, Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from . import mixture
from .ask import Stream
from .native_trainer import TRANSFER, Trainer
from .plugins import variables

KINDS = ("exception", "out of memory", "kill -9", "hang")
POINTS = ("open", "chunk", "staging", "prepare", "commit", "verify", "rollback")
NATIVE_KINDS = ("exception", "kill -9", "hang")
NATIVE_POINTS = ("init", "open", "chunk", "staging", "prepare", "commit", "verify")
"""In `init_weight_transfer_engine`, `start_weight_update`, `update_weights` before and after it receives, and in the three
steps of `finish_weight_update`."""
LOAD_POINTS = ("between", "staging", "prepare", "commit", "verify")
"""In a call of a worker extension: between two buckets, as the second is staged, and in the steps after its end."""
DEADLINE_SECONDS = 15.0
"""Deadline of servers whose engine is to hang: that is noticed after this long."""
PATIENT_SECONDS = 120.0
"""Deadline of the others: on a busy machine a step may take long. Their engine goes on, or is gone at once."""
GRACE_SECONDS = 60.0
"""Beyond the deadline: vLLM's own way out, on a machine with little to spare."""
UNTOUCHED, POISONED, DEAD = "untouched", "poisoned, healed by a full update", "engine dead"


@dataclass(frozen=True)
class Cell:
    """One fault. `ranks`: tensor-parallel size; the fault strikes the last of them. `lasting`: its undoing fails as well.
    `experts`: in a mixture of experts, which the ranks share out. `native`: weights come by vLLM's weight transfer.
    `processes`: API server processes. `loads`: weights come by `load_weights`, in a call of a worker extension. `cores`:
    data-parallel size; the fault strikes a rank of the last core. `stages`: pipeline-parallel size; it strikes the last one.
    """

    kind: str
    point: str
    ranks: int
    lasting: bool = False
    experts: bool = False
    native: bool = False
    processes: int = 1
    loads: bool = False
    cores: int = 1
    stages: int = 1

    def __str__(self) -> str:
        on = f"TP {self.ranks}{', experts' if self.experts else ''}{', native' if self.native else ''}"
        on += ", load_weights" if self.loads else ""
        on += f", DP {self.cores}" if self.cores > 1 else ""
        on += f", PP {self.stages}" if self.stages > 1 else ""
        on += f", {self.processes} API processes" if self.processes > 1 else ""
        return f"{self.kind}{', twice' if self.lasting else ''}, {self.point}, {on}"

    @property
    def deadline_seconds(self) -> float:
        """Return the deadline of its server."""
        return (
            self.ranks * self.cores * self.stages * DEADLINE_SECONDS
            if self.kind == "hang"
            else PATIENT_SECONDS
        )

    @property
    def expected(self) -> str:
        """How it must end."""
        if self.kind == "kill -9" or (self.kind == "hang" and (self.loads or self.point != "staging")):
            return DEAD
        return POISONED if self.lasting or self.point == "verify" else UNTOUCHED


CELLS = tuple(
    Cell(kind, point, ranks, lasting, experts, processes=processes)
    for ranks, experts, processes in (
        *((1, False, 1), (2, False, 1), (1, True, 1), (2, True, 1)),
        (1, False, 2),
    )
    for point in POINTS
    for kind in KINDS
    for lasting in ((False, True) if kind == "exception" and point in ("commit", "rollback") else (False,))
)
NATIVE_CELLS = tuple(
    Cell(kind, point, ranks, native=True)
    for ranks in (1, 2)
    for point in NATIVE_POINTS
    for kind in NATIVE_KINDS
)
LOAD_CELLS = tuple(
    Cell(kind, point, ranks, loads=True) for ranks in (1, 2) for point in LOAD_POINTS for kind in NATIVE_KINDS
)


DATA_PARALLEL_CELLS = tuple(
    Cell(kind, point, 1, lasting, experts, cores=2)
    for experts in (False, True)
    for point in POINTS
    for kind in KINDS
    for lasting in ((False, True) if kind == "exception" and point in ("commit", "rollback") else (False,))
)


PIPELINE_CELLS = tuple(
    Cell(kind, point, 1, lasting, stages=2)
    for point in POINTS
    for kind in KINDS
    for lasting in ((False, True) if kind == "exception" and point in ("commit", "rollback") else (False,))
)


@dataclass(frozen=True)
class Ending:
    """How a cell ended. `answered`: seconds until every open call had its answer, and what the broken call got. `deadline`:
    `deadline_seconds` of its server."""

    end: str
    answer: str
    answered: float
    deadline: float = DEADLINE_SECONDS


class FaultyServer(Server):
    """A server with the fault plugin: of the dense model, or of the mixture of experts. It keeps idle connections open."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        experts: bool = False,
        *more: str,
        processes: int = 1,
        cores: int = 1,
        stages: int = 1,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        name = f"tp{ranks}-{time.monotonic_ns()}"
        self.fault = folder / f"{name}.json"
        self.ranks, self.experts = ranks, experts
        self.deadline = deadline_seconds
        self.patience = deadline_seconds + GRACE_SECONDS
        """Seconds within which whatever happens has happened."""
        self.early, self.late = (mixture.EARLY, mixture.LATE) if experts else (EARLY, LATE)
        arguments = SMALL
        if ranks * stages > 1:
            arguments += ("--tensor-parallel-size", str(ranks), "--distributed-executor-backend", "mp")
        arguments += ("--pipeline-parallel-size", str(stages)) if stages > 1 else ()
        arguments += ("--enable-expert-parallel",) if experts and ranks * cores > 1 else ()
        arguments += ("--data-parallel-size", str(cores)) if cores > 1 else ()
        arguments += ("--api-server-count", str(processes)) if processes > 1 else ()
        plugins = ("fp8ext_faults", *(("fp8ext_cpu_gather",) if experts and cores > 1 else ()))
        plugins += ("fp8ext_cpu_stages",) if stages > 1 else ()
        arguments += (*TRANSFER, "--worker-extension-cls", "loading_worker.LoadingWorker", *more)
        super().__init__(
            self.early,
            folder / f"{name}.log",
            arguments=arguments,
            settings={
                "deadline_seconds": deadline_seconds,
                "upload_idle_seconds": deadline_seconds,
                "native_update_seconds": deadline_seconds,
            },
            variables=variables(folder, *plugins, ranks=ranks, beside=["loading_worker"])
            | {"FP8EXT_FAULT": str(self.fault)}
            | {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
            | ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if cores * stages > 1 else {}),
        )


def run(server: FaultyServer, cell: Cell) -> Ending:
    """Let a fault strike a server that serves well, and see how it ends. A server that is untouched can take the next.

    It is stopped where it can't: after a hang, which a thread of a rank stays in, and when nobody knows what became of it.

    Raises:
        AssertionError: it ended in another way than it must, or not in time.
    """
    usable = False
    try:
        ending = _strike(server, cell)
        usable = cell.kind != "hang"
    finally:
        if not usable:
            server.stop()
    return ending


def _strike(server: FaultyServer, cell: Cell) -> Ending:
    with server.client() as client:
        client.push(server.early, version="early")
        if cell.point == "rollback":
            client.push(server.late, version="late")
    before = _state(server)
    ready = _ready_native if cell.native else _ready_loads if cell.loads else _ready
    call = ready(server, cell)
    stream = Stream(server, tokens=200)
    server.fault.write_text(json.dumps(_fault(cell)))
    begun = time.monotonic()
    answer = call()
    assert cell.lasting or not server.fault.exists(), f"{cell}: the fault did not strike ({answer})"
    if cell.expected == DEAD:
        code = server.process.wait(server.patience)
        assert code != 0, f"{cell}: the server ended with code 0"
    elif cell.expected == POISONED:
        _require_poisoned(server)
        server.fault.unlink(missing_ok=True)
    else:
        assert _state(server) == before, f"{cell}: what is served has changed"
    stream.wait(server.patience)
    answered = time.monotonic() - begun
    if cell.expected == DEAD:
        require_nothing_left(server)
    elif cell.kind != "hang":
        _heal(server)
    assert cell.expected != UNTOUCHED or stream.finish == "length", f"{cell}: {stream.finish}"
    return Ending(cell.expected, answer, answered, server.deadline)


def _fault(cell: Cell) -> dict[str, Any]:
    renamed = {"commit": "exchange", "rollback": "exchange", "init": "chunk"}
    point = renamed.get(cell.point, cell.point)
    rank = 0 if cell.point == "open" else cell.cores * cell.stages * cell.ranks - 1
    # what commits at once prepares as well, which takes one fingerprint
    skip = int((cell.native or cell.loads) and cell.point == "verify")
    return {"point": point, "kind": cell.kind, "rank": rank, "lasting": cell.lasting, "skip": skip}


def _ready_native(server: FaultyServer, cell: Cell) -> Callable[[], str]:
    """Bring an update by vLLM's weight transfer to the broken point; the call that is to break, and what it is answered."""
    trainer = Trainer(server)
    if cell.point == "init":
        return lambda: _native_answer(trainer, trainer.try_init)
    trainer.init()
    if cell.point == "open":
        return lambda: _native_answer(trainer, lambda: trainer.post("/start_weight_update"))
    trainer.call("/start_weight_update")
    if cell.point in ("chunk", "staging"):
        return lambda: _native_answer(
            trainer, lambda: trainer.send(load_file(server.late / "model.safetensors"))
        )
    trainer.send(load_file(server.late / "model.safetensors"))
    return lambda: _native_answer(
        trainer, lambda: trainer.post("/finish_weight_update", {"weight_version": "late"})
    )


def _native_answer(trainer: Trainer, call: Callable[[], httpx.Response]) -> str:
    with trainer:
        try:
            reply = call()
        except httpx.HTTPError:
            return "connection closed"
    assert reply.status_code >= 400, reply.text
    return f"{reply.status_code} {reply.json()['error']['type']}"


def _ready_loads(server: FaultyServer, cell: Cell) -> Callable[[], str]:
    """Return the call of a worker extension that is to break, and what it is answered."""
    body = {
        "method": "load_in_buckets",
        "args": [str(server.late), 3, "process_weights_after_loading"],
    }
    headers = {"Authorization": f"Bearer {server.key}"}

    def call() -> str:
        try:
            reply = httpx.post(
                f"{server.url}/collective_rpc", json=body, headers=headers, timeout=server.patience
            )
        except httpx.TimeoutException:
            raise AssertionError("no answer") from None
        except httpx.HTTPError:
            return "connection closed"
        assert reply.status_code >= 400, reply.text
        return f"{reply.status_code} {reply.json()['error']['type']}"

    return call


def _ready(server: FaultyServer, cell: Cell) -> Callable[[], str]:
    """Bring an update to the broken point; the call that is to break, and what it is answered."""
    request = _request(server, cell)
    return lambda: _answer(server, *request)


def _request(server: FaultyServer, cell: Cell) -> tuple[str, str, bytes | None]:
    if cell.point == "open":
        return "POST", "/updates", b"{}"
    if cell.point == "rollback":
        return "POST", "/rollback", b"{}"
    body = (server.late / "model.safetensors").read_bytes()
    with server.client() as client:
        id = client.open(version="late").id
        if cell.point in ("chunk", "staging"):
            return "PUT", f"/updates/{id}/chunks/0", body
        client.put_chunk(id, 0, body, len(body))
        if cell.point == "prepare":
            return "POST", f"/updates/{id}/prepare", None
        client.prepare(id)
        return "POST", f"/updates/{id}/commit", None


def _answer(server: FaultyServer, method: str, path: str, body: bytes | None) -> str:
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    url = f"{server.url}/fp8ext/v1{path}"
    try:
        reply = httpx.request(method, url, content=body, headers=headers, timeout=server.patience)
    except httpx.TimeoutException:
        raise AssertionError(f"{method} {path}: no answer") from None
    except httpx.HTTPError:
        return "connection closed"
    assert reply.status_code >= 400, reply.text
    return f"{reply.status_code} {reply.json()['type'].rpartition(':')[2]}"


def _state(server: Server) -> dict[str, Any]:
    """What is served: epoch, digests, greedy tokens. An update that the fault left open is given up first."""
    with server.client() as client:
        weights = client.weights()
        if weights.update:
            client.abandon(weights.update)
        digests = client.digests().model_dump()
    body = {
        "model": MODEL,
        "prompt": "123+456=",
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240).raise_for_status().json()
    return {"epoch": weights.epoch, "digests": digests, "tokens": reply["choices"][0]["token_ids"]}


def _require_poisoned(server: Server) -> None:
    """Nothing is generated, and every route says why."""
    for method, path in (
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/inference/v1/generate"),
        ("GET", "/v1/models"),
        ("GET", "/health"),
    ):
        reply = httpx.request(method, f"{server.url}{path}", json={}, timeout=120)
        assert reply.status_code == 503, f"{path}: {reply.status_code} {reply.text}"
        assert reply.json()["type"] == "urn:fp8ext:problem:poisoned"
    with server.client() as client:
        weights = client.weights()
        assert weights.state == "poisoned"
        with pytest.raises(UpdateError, match="only a full update heals") as refused:
            client.open(partial=True, base_epoch=weights.epoch)
        assert (refused.value.kind, refused.value.status) == ("poisoned", 503)


def _heal(server: FaultyServer) -> None:
    """A full update goes through (an open one is given up first), and every rank answers for itself and has what was sent."""
    with server.client() as client:
        weights = client.weights()
        if weights.update:
            client.abandon(weights.update)
        client.push(server.late, version="late")
        served = client.digests().digests
        manifest = Manifest.from_dict(client.manifest())
        assert served == checkpoint_digests(server.late, manifest)
    httpx.get(f"{server.url}/health", timeout=120).raise_for_status()
    assert _state(server)["tokens"]


def require_nothing_left(server: Server) -> None:
    """No process of a server that ended lives on (all of them are in its process group)."""
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until:
        try:
            os.killpg(server.process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    listing = subprocess.run(["ps", "-eo", "pgid,pid,stat,args"], capture_output=True, text=True).stdout
    left = [line for line in listing.splitlines() if line.split()[0] == str(server.process.pid)]
    assert not [line for line in left if " Z" not in line], "left behind:\n" + "\n".join(left)
