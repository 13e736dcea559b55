# SPDX-License-Identifier: Apache-2.0
"""vLLM's endpoint plugin: mounts the routes when there is an admin key, and shows weight versions in responses."""

import asyncio
import atexit
import contextlib
import logging
import math
import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from vllm_fp8ext.compat.engine_client import EngineCalls
from vllm_fp8ext.compat.weight_versions import install as show_weight_versions
from vllm_fp8ext.config import Settings
from vllm_fp8ext.environment import ADMIN_KEY
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.poison_guard import PoisonGuard
from vllm_fp8ext.serve.routes import Backend, router
from vllm_fp8ext.serve.spool import Spool
from vllm_fp8ext.weights.manifest import Manifest

logger = logging.getLogger("vllm.fp8ext")

_HEADER_ROOM = 4096
_LOOK_SECONDS = 5.0


class Fp8ExtEndpoints:
    """Implements vLLM's `EndpointPlugin` protocol."""

    name = "fp8ext"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._backend = Backend()

    def attach_router(self, app: FastAPI) -> None:
        """Mount the routes under `/fp8ext/v1`, if there is a key to guard them with."""
        show_weight_versions()
        key = os.environ.get(ADMIN_KEY)
        if not key:
            logger.warning(
                "fp8ext: no weight-update routes, because %s is not set; set it to a secret to have them",
                ADMIN_KEY,
            )
            return
        app.include_router(router(AdminKey(key), self._backend))
        app.add_middleware(PoisonGuard, reason=lambda: self._backend.poisoned)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Connect the routes with the engine."""
        if engine_client is None:
            return
        settings = Settings.parse(engine_client.vllm_config.additional_config)
        backend = self._backend
        backend.engine = EngineCalls(engine_client, settings.deadline_seconds)
        atexit.register(backend.engine.require_clean_end)
        backend.spool = Spool(settings.spool_dir, settings.spool_bytes, settings.upload_idle_seconds)
        atexit.register(backend.spool.close)
        backend.allowed_dirs = tuple(Path(os.path.realpath(folder)) for folder in settings.allowed_dirs)
        if os.environ.get(ADMIN_KEY):
            await self._require_room()
            self._looking = asyncio.create_task(self._look())

    async def _require_room(self) -> None:
        """Raises `ConfigError` when the largest tensor could never be sent."""
        try:
            manifest = Manifest.from_dict(await self._backend.engine("manifest"))
        except UpdateError as error:
            logger.info("fp8ext: no live updates: %s", error)
            return
        sizes = {
            name: math.prod(spec.shape) * spec.torch_dtype.itemsize for name, spec in manifest.tensors.items()
        }
        largest = max(sizes, key=lambda name: sizes[name])
        self._backend.spool.require_room(sizes[largest] + _HEADER_ROOM, f"{largest} alone")

    async def _look(self) -> None:
        """Keep metrics and the poison guard up to date as long as the engine lives."""
        with contextlib.suppress(UpdateError):
            while True:
                await self._backend.look()
                await asyncio.sleep(_LOOK_SECONDS)


def endpoint_plugin() -> Fp8ExtEndpoints:
    """The entry point that vLLM calls."""
    return Fp8ExtEndpoints()
