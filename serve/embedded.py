# SPDX-License-Identifier: Apache-2.0
"""The update session for trainers that hold the engine in their own process: the routes of `/fp8ext/v1` on an `AsyncLLM`,
called without a network.

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model, quantization="blockfp8"))
    async with embedded(engine) as weights:
        await weights.push(model.state_dict(), transport="ipc", version="step-1")
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.client import AsyncClient
from vllm_fp8ext.serve.routes import router

_URL = "http://fp8ext.embedded"
"""Nobody resolves it."""


@contextlib.asynccontextmanager
async def embedded(engine: Any) -> AsyncIterator[AsyncClient]:
    """A client of the weights of this `AsyncLLM`, which was made with `quantization="blockfp8"`, on the event loop that it
    runs on. Settings are those of its `additional_config`. To be entered once for the life of the engine.

    Raises:
        ConfigError: the largest tensor would not fit where uploads wait.
        UpdateError: `updates-unavailable`: an engine that takes no updates.
    """
    backend, key, app = Backend(CollectorRegistry()), secrets.token_urlsafe(16), FastAPI()
    backend.connect(engine)
    app.include_router(router(AdminKey(key), backend))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(backend.spool.close)
        await backend.require_room()
        looking = asyncio.create_task(backend.keep_looking())
        stack.callback(looking.cancel)
        transport = httpx.ASGITransport(app)
        yield await stack.enter_async_context(AsyncClient(_URL, key, retries=0, transport=transport))
