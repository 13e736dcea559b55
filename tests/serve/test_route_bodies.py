# SPDX-License-Identifier: Apache-2.0
"""What a body says reaches the engine as plain data, wherever the body was checked."""

import asyncio
import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_answers import engine_status, update_state
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.routes import router
from vllm_fp8ext.serve.spool import Spool
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.results import Lifetime, ServedManifest

SPEC = TensorSpec("model.norm.weight", (4,), "bfloat16")
MANIFEST = Manifest({SPEC.name: SPEC}, frozenset(), {SPEC.name: ()}, "fp32", 1)
UPDATE = update_state()
HEADERS = {"Authorization": "Bearer secret", "Content-Type": "application/json"}


class Engine:
    """Answers everything alike, and notes what it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, operation: str, **arguments: Any) -> Any:
        self.asked.append((operation, arguments))
        answers = {"manifest": ServedManifest(manifest=MANIFEST.as_dict()), "check": Lifetime(seconds=60.0)}
        answers["status"] = engine_status()
        return answers.get(operation, UPDATE)

    async def job(self, operation: str, **arguments: Any) -> Any:
        return await self(operation, **arguments)

    async def wait_for_job(self, operation: str, started: Any) -> Any:
        return UPDATE

    call_until_drained = __call__


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def backend(engine: Engine, tmp_path: Path) -> Iterator[Backend]:
    backend = Backend(CollectorRegistry())
    backend.engine = engine  # type: ignore[assignment]
    backend.spool = Spool(str(tmp_path), 1 << 20)
    backend.receive_bytes, backend.receive_seconds = 1 << 12, 1.0
    asyncio.run(backend.require_room())
    engine.asked.clear()
    yield backend
    backend.spool.close()
    backend.bodies.close()


def answer(backend: Backend, method: str, path: str, content: bytes) -> httpx.Response:
    app = FastAPI()
    app.include_router(router(AdminKey("secret"), backend))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            return await http.request(method, f"/fp8ext/v1{path}", content=content, headers=HEADERS)

    return asyncio.run(ask())


TENSOR = {"name": SPEC.name, "dtype": "bfloat16", "shape": [4], "offset": 0}
OPEN = {
    "version": "step-1",
    "base_epoch": 3,
    "running": "wait",
    "wait_seconds": 5,
    "tensors": {SPEC.name: {"shape": [4], "sha256": "0" * 64}},
    "canary": {"prompts": [[1, 2]]},
    "kv_scales": {"policy": "provided", "scales": {"l.0": {"k": 1, "v": [0.5]}}},
}
HANDLE = base64.b64encode(bytes(64)).decode()


def told(engine: Engine, operation: str) -> dict[str, Any]:
    return next(arguments for asked, arguments in engine.asked if asked == operation)


@pytest.mark.parametrize("filler", [0, 2000], ids=["small", "large"])
def test_what_an_update_is_opened_with(backend: Backend, engine: Engine, filler: int) -> None:
    result = answer(backend, "POST", "/updates", json.dumps(OPEN).encode() + b" " * filler)
    assert result.status_code == 201, result.text
    arguments = told(engine, "open")
    json.dumps(arguments)  # plain
    assert arguments["tensors"] == {SPEC.name: {"shape": [4], "dtype": None, "sha256": "0" * 64}}
    assert arguments["canary"] == {"prompts": [[1, 2]], "max_perplexity": None}
    assert arguments["kv_scales"]["scales"] == {"l.0": {"k": 1.0, "v": [0.5], "q": None}}
    assert (arguments["version"], arguments["running"], arguments["wait_seconds"]) == ("step-1", "wait", 5.0)


@pytest.mark.parametrize("filler", [0, 2000], ids=["small", "large"])
def test_tensors_that_are_on_a_gpu_or_about_to_come(backend: Backend, engine: Engine, filler: int) -> None:
    handles = {
        "n": 0,
        "device": "uuid",
        "allocations": [{"handle": HANDLE, "bytes": 64}],
        "tensors": [TENSOR | {"allocation": 0}],
    }
    result = answer(backend, "POST", "/updates/u/handles", json.dumps(handles).encode() + b" " * filler)
    assert result.status_code == 200, result.text
    assert told(engine, "stage")["tensors"] == [[SPEC.name, [4], "bfloat16", 0, 8]]
    engine.asked.clear()
    group = {"backend": "gloo", "id": "host:1/name", "size": 2, "first_rank": 1}
    bucket = {"n": 1, "group": group, "bytes": 16, "mark": "0" * 16, "tensors": [TENSOR]}
    result = answer(backend, "POST", "/updates/u/receive", json.dumps(bucket).encode() + b" " * filler)
    assert result.status_code == 202, result.text
    arguments = told(engine, "stage")
    assert arguments["tensors"] == [[SPEC.name, [4], "bfloat16", 0, 8]]
    assert arguments["source"]["id"] == "host:1/name"


@pytest.mark.parametrize("filler", [0, 2000], ids=["small", "large"])
def test_tensors_of_a_chunk(backend: Backend, engine: Engine, filler: int) -> None:
    entries = {
        "__metadata__": {"filler": " " * filler},
        SPEC.name: {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
    }
    header = json.dumps(entries).encode()
    body = struct.pack("<Q", len(header)) + header + bytes(8)
    result = answer(backend, "PUT", "/updates/u/chunks/7", body)
    assert result.status_code == 200, result.text
    assert told(engine, "stage")["tensors"] == [[SPEC.name, [4], "bfloat16", 8 + len(header), 8]]
    assert told(engine, "stage")["size"] == len(body)


@pytest.mark.parametrize(
    ("content", "running"), [(b"", "keep"), (b"{}", "keep"), (b'{"running": "abort"}', "abort")]
)
def test_a_body_may_be_left_out(backend: Backend, engine: Engine, content: bytes, running: str) -> None:
    answer(backend, "POST", "/rollback", content)
    assert told(engine, "rollback") == {"running": running, "wait_seconds": None}


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_says_that_it_is_json(backend: Backend, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEADERS, "Content-Type", kind)
    result = answer(backend, "POST", "/updates", b"{}")
    assert result.status_code == 422
    assert "Content-Type: application/json" in result.json()["problems"][0]["message"]
    monkeypatch.setitem(HEADERS, "Content-Type", "application/json; charset=utf-8")
    assert answer(backend, "POST", "/updates", b"{}").status_code == 201


def test_what_is_served_is_told_with_the_features_of_the_server(backend: Backend) -> None:
    backend.features = [{"name": "fusion", "on": False, "reason": "it needs a GPU"}]
    told = answer(backend, "GET", "/weights", b"")
    assert told.status_code == 200
    assert (told.json()["epoch"], told.json()["features"]) == (0, backend.features)
