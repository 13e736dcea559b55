# SPDX-License-Identifier: Apache-2.0
"""The update session for trainers that hold the engine in their own process: the routes of `/fp8ext/v1`, called without a
network.

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model, quantization="blockfp8"))
    async with embedded(engine) as weights:
        for step in range(100):
            ...
            await weights.push(model.state_dict(), transport="ipc", version=f"step-{step}")

    llm = LLM(model, quantization="blockfp8")
    with embedded_blocking(llm) as weights:
        for step in range(100):
            ...
            weights.push(model.state_dict(), transport="ipc", version=f"step-{step}")

To be entered once for as long as the engine is updated, and left before the engine is let go. An update that is open then is
abandoned.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from anyio.from_thread import start_blocking_portal
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from vllm_fp8ext.compat.features import is_available
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.blocking_transport import BlockingTransport
from vllm_fp8ext.serve.client import AsyncClient, Client
from vllm_fp8ext.serve.in_process_transport import InProcessTransport
from vllm_fp8ext.serve.routes import router

_URL = "http://fp8ext.embedded"
"""Nobody resolves it."""
_LEAVING_SECONDS = 10.0
"""How long the engine may take to answer when it is left."""


@contextlib.asynccontextmanager
async def embedded(engine: Any) -> AsyncIterator[AsyncClient]:
    """Yield a client of the weights of an `AsyncLLM` on its own event loop. The engine was made with
    `quantization="blockfp8"`. Settings are those of its `additional_config`. One at a time for an engine.

    Raises:
        ConfigError: there is one already, or the largest tensor would not fit where uploads wait.
        UpdateError: `updates-unavailable`: an engine that takes no updates.
    """
    async with (
        _routes(engine) as (key, routes),
        AsyncClient(_URL, key, retries=0, transport=InProcessTransport(routes)) as client,
    ):
        yield client


@contextlib.contextmanager
def embedded_blocking(llm: Any) -> Iterator[Client]:
    """`embedded`, of an `LLM`. The client may be used while another thread is in `LLM.generate`.

    Raises:
        ConfigError: also, the engine core is not a process of its own (`VLLM_ENABLE_V1_MULTIPROCESSING=0`).
    """
    from vllm_fp8ext.compat.update.blocking_client import BlockingEngine  # a server has no use for these

    if is_available("beam_versions"):
        from vllm_fp8ext.compat.update.beam_versions import install_offline

        install_offline()
    with contextlib.ExitStack() as stack:
        engine = BlockingEngine(llm)
        stack.callback(engine.close)
        portal = stack.enter_context(start_blocking_portal())
        key, routes = stack.enter_context(portal.wrap_async_context_manager(_routes(engine)))
        transport = BlockingTransport(portal, routes)
        yield stack.enter_context(Client(_URL, key, retries=0, transport=transport))


@contextlib.asynccontextmanager
async def _routes(engine: Any) -> AsyncIterator[tuple[str, httpx.AsyncBaseTransport]]:
    """The routes on this engine: the key to them, and the way."""
    backend, key, app = Backend(CollectorRegistry()), secrets.token_urlsafe(16), FastAPI()
    app.include_router(router(AdminKey(key), backend))
    if is_available("weight_versions"):
        from vllm_fp8ext.compat.update import weight_versions

        weight_versions.track()
    with contextlib.ExitStack() as stack:
        stack.callback(backend.close)
        backend.connect(engine)
        await backend.require_room()
        looking = asyncio.create_task(backend.keep_refreshing())
        stack.callback(looking.cancel)
        try:
            yield key, httpx.ASGITransport(app)
        finally:
            with contextlib.suppress(TimeoutError, UpdateError):  # the engine may have ended
                async with asyncio.timeout(_LEAVING_SECONDS):
                    await backend.abandon_open()
