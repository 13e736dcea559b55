# SPDX-License-Identifier: Apache-2.0
"""The routes on a real update engine whose ranks read files as a server's do, and keep what they read; no model."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from vllm_fp8ext.compat.update.engine_client import EngineCalls, _unwrapped
from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.serve.allowed_dirs import AllowedDirs
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.routes import router
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.rank_results import (
    Accepted,
    CanaryScore,
    Fingerprint,
    RankResult,
    StagedTensors,
    SwapTime,
)
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.engine.engine import UpdateEngine
from vllm_fp8ext.update.transports.receiver import Receivers
from vllm_fp8ext.update.transports.registry import source_from_dict

_HEADERS = {"Authorization": "Bearer key", "Content-Type": "application/json"}


class Ranks:
    """Two ranks. `after` is called with the path of each file that both have read; `served` has what was committed."""

    def __init__(self) -> None:
        self.after: Callable[[Path], None] = lambda path: None
        self.staged: dict[str, list[float]] = {}
        self.served: dict[str, list[float]] = {}
        self._receivers = (Receivers(0), Receivers(1))
        self._outcomes: dict[int, list[RankResult]] = {}

    def __call__(self, method: str, *arguments: Any) -> list[RankResult]:
        if method == "poll":
            return self._outcomes.pop(arguments[0])
        if method == "wait_for_swap":
            return [SwapTime(seconds=0.0)] * 2
        if method == "swap":
            self.served = dict(self.staged)
            return [Accepted()] * 2
        if method == "stage":
            job, _, source, tensors, *_ = arguments
            self._outcomes[job] = [self._read(receivers, source, tensors) for receivers in self._receivers]
            self.after(Path(source.get("path", "")))
        elif arguments:
            self._outcomes[arguments[0]] = [Fingerprint(fingerprint=1, canary=CanaryScore())] * 2
        return [Accepted()] * 2

    def _read(self, receivers: Receivers, source: dict[str, Any], tensors: list[Any]) -> RankResult:
        stored = [
            StoredTensor(TensorSpec(n, tuple(shape), dtype), *place) for n, shape, dtype, *place in tensors
        ]
        collected: dict[str, list[float]] = {}
        try:
            with receivers.open(source_from_dict(source), stored) as parts:
                for rows in parts:
                    collected.setdefault(rows.stored.spec.name, []).extend(rows.values.flatten().tolist())
        except UpdateError as error:
            return Failure.of(error, unchanged=True)
        self.staged |= collected
        return StagedTensors()


class Core:
    """What an update engine needs of an engine that runs nothing."""

    settings = Settings()
    quantization = "blockfp8"
    kv_cache_dtype = "auto"
    instance = "one"
    vocabulary = longest_prompt = 100

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.compiled: list[dict[str, int]] = []
        self.asleep = self.paused = lambda: False
        self.unfinished = self.irreplaceable = lambda: 0
        self.restart_prompts = lambda: (0, 0)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


class Calls(EngineCalls):
    """Calls of an engine in this process."""

    def __init__(self, engine: UpdateEngine) -> None:
        self._engine = engine
        self._deadline = 600.0
        self._left = False

    async def __call__(self, operation: str, **arguments: Any) -> Any:
        await asyncio.sleep(0)
        return _unwrapped(self._engine.handle(operation, arguments))


class DiskServer:
    """Takes tensors `a` and `b`, fp32 `[2]`, from these folders."""

    def __init__(self, *allowed: Path) -> None:
        self.ranks = Ranks()
        engine = UpdateEngine(Core(self.ranks))  # type: ignore[arg-type]
        specs = {name: TensorSpec(name, (2,), "float32") for name in "ab"}
        engine._model._manifest = Manifest(specs, frozenset(), dict.fromkeys(specs, ()), "fp32", 2)
        engine._fingerprints.keep(engine.committer.live, [0, 0], None)
        self.backend = Backend(CollectorRegistry())
        self.backend.engine = Calls(engine)
        self.backend.allowed_dirs = AllowedDirs(map(str, allowed))
        self.backend.metrics.observe = lambda status: None  # type: ignore[method-assign]
        self.backend.receive_bytes = 1
        self.backend.spool = type("Room", (), {"limit": 1})()
        self.app = FastAPI()
        self.app.include_router(router(AdminKey("key"), self.backend))

    def post(self, route: str, /, **body: Any) -> httpx.Response:
        """Call a route."""

        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here/fp8ext/v1") as client:
                return await client.post(route, content=json.dumps(body), headers=_HEADERS)

        return asyncio.run(call())
