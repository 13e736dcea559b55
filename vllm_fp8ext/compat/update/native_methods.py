# SPDX-License-Identifier: Apache-2.0
"""Leads the weight transfer methods of `AsyncLLM` and `LLM` to the update engine.

vLLM's own call a method of every worker, which blocks engine steps and ends rank by rank.
"""

import asyncio
import importlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from vllm_fp8ext.compat.update.engine_client import EngineCalls
from vllm_fp8ext.compat.update.native_calls import NativeTransfer
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.config import METHOD, Settings
from vllm_fp8ext.errors import UpdateError

FEATURE: str = "weight_transfer"
WHY: str = "Open, feed and commit updates in the engine core, whoever calls vLLM's weight transfer methods."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.engine.async_llm:AsyncLLM.init_weight_transfer_engine",
    "vllm.v1.engine.async_llm:AsyncLLM.start_weight_update",
    "vllm.v1.engine.async_llm:AsyncLLM.start_draft_weight_update",
    "vllm.v1.engine.async_llm:AsyncLLM.update_weights",
    "vllm.v1.engine.async_llm:AsyncLLM.finish_weight_update",
    "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version",
    "vllm.v1.engine.async_llm:AsyncLLM.get_weight_version",
    "vllm.entrypoints.llm:LLM.init_weight_transfer_engine",
    "vllm.entrypoints.llm:LLM.start_weight_update",
    "vllm.entrypoints.llm:LLM.start_draft_weight_update",
    "vllm.entrypoints.llm:LLM.update_weights",
    "vllm.entrypoints.llm:LLM.finish_weight_update",
    "vllm.entrypoints.llm:LLM.update_weight_version",
    "vllm.entrypoints.llm:LLM.get_weight_version",
)
USES: dict[str, tuple[str, ...]] = {
    "call the engine core of an LLM without waiting in its loop": (
        "vllm.v1.engine.core_client:SyncMPClient.call_utility(method)",
        "vllm.v1.engine.core_client:InprocClient.engine_core",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's weight transfer goes through its engine core"

METHODS: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
    "init_weight_transfer_engine": lambda transfer, request: transfer.init(_part(request, "init_info")),
    "shutdown_weight_transfer_engine": lambda transfer: transfer.shutdown(),
    "start_weight_update": lambda transfer: transfer.start(),
    "start_draft_weight_update": lambda transfer: transfer.refuse_draft(),
    "update_weights": lambda transfer, request: transfer.update(_part(request, "update_info")),
    "finish_weight_update": lambda transfer, weight_version=None: _finish(transfer, weight_version),
    "update_weight_version": lambda transfer, new_version: transfer.relabel(new_version),
    "get_weight_version": lambda transfer: transfer.version(),
}
"""Coroutine of each method, by its name. `shutdown_weight_transfer_engine` came with vLLM 0.32."""


def install() -> None:
    """Idempotent."""
    from vllm.v1.engine.async_llm import AsyncLLM

    for owner, way in ((AsyncLLM, _awaited), (_blocking_owner(), _blocking)):
        for name, call in METHODS.items():
            if hasattr(owner, name):
                wrap(owner, name, _wrapper(name, call, way))


def _blocking_owner() -> Any:
    """Return the class from which `LLM` has the methods: itself in vLLM 0.31. To import that takes a second."""
    try:
        return importlib.import_module("vllm.entrypoints.rl.offline").RLOfflineMixin
    except (ImportError, AttributeError):
        return importlib.import_module("vllm.entrypoints.llm").LLM


def _wrapper(name: str, call: Callable[..., Any], way: Callable[..., Any]) -> Callable[[Any], Any]:
    def around(original: Any) -> Any:
        return way(original, call)

    around.__qualname__ = f"{way.__name__}.{name}"
    return around


def _awaited(original: Any, call: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    async def method(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.vllm_config.model_config.quantization != METHOD:
            return await original(self, *arguments, **named)
        return await call(_transfer(self), *arguments, **named)

    return method


def _blocking(original: Any, call: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        engine = self.llm_engine
        if engine.vllm_config.model_config.quantization != METHOD:
            return original(self, *arguments, **named)
        transfer = _transfer(_BlockingClient(engine))
        with ThreadPoolExecutor(1) as beside:  # where this is called in an event loop, too
            return beside.submit(asyncio.run, call(transfer, *arguments, **named)).result()

    return method


def _transfer(client: Any) -> NativeTransfer:
    settings = Settings.parse(client.vllm_config.additional_config)
    return NativeTransfer(
        *(_Calls(client, settings.deadline_seconds), settings.upload_idle_seconds),
        read_pickles=settings.native_pickled_handles,
    )


async def _finish(transfer: NativeTransfer, version: str | None) -> None:
    await transfer.finish(version)


def _part(request: Any, name: str) -> Any:
    """Return the information of a request, which `LLM` takes as a dictionary, too."""
    return request[name] if isinstance(request, dict) else getattr(request, name)


class _Calls(EngineCalls):
    """Calls the engine beside a session of updates, which watches its processes."""

    def __init__(self, client: Any, deadline_seconds: float) -> None:
        self._client = client
        self._heard = lambda reason: None
        self._core = client.engine_core
        self._deadline = deadline_seconds
        self.end: Any = _NoEnd()
        self._left = False


class _NoEnd:
    """In place of `EngineEnd`."""

    def kill(self, reason: str) -> NoReturn:
        raise UpdateError("engine-timeout", reason, status=504)


class _Resources:
    engine_dead = False


class _BlockingClient:
    """Gives `EngineCalls` the engine of an `LLM`, whose calls block."""

    _turn = threading.Lock()

    def __init__(self, engine: Any) -> None:
        self.vllm_config = engine.vllm_config
        self._core = engine.engine_core
        self.engine_core = self

    @property
    def resources(self) -> Any:
        """Return what tells whether the engine has died."""
        return getattr(self._core, "resources", _Resources)

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine core, in this process or its own."""
        with self._turn:
            if hasattr(self._core, "call_utility"):
                return self._core.call_utility(method, *arguments)
            return getattr(self._core.engine_core, method)(*arguments)
