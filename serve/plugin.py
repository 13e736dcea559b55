# SPDX-License-Identifier: Apache-2.0
"""vLLM's endpoint plugin: mounts the routes when there is an admin key, and shows weight versions in responses."""

import atexit
import logging
import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from vllm_fp8ext.compat.engine_client import EngineCalls
from vllm_fp8ext.compat.weight_versions import install as show_weight_versions
from vllm_fp8ext.config import Settings
from vllm_fp8ext.environment import ADMIN_KEY
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.routes import Backend, router
from vllm_fp8ext.serve.spool import Spool

logger = logging.getLogger("vllm.fp8ext")


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

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Connect the routes with the engine."""
        if engine_client is None:
            return
        settings = Settings.parse(engine_client.vllm_config.additional_config)
        self._backend.engine = EngineCalls(engine_client, settings.deadline_seconds)
        self._backend.spool = Spool(settings.spool_dir, settings.spool_bytes)
        atexit.register(self._backend.spool.close)
        self._backend.allowed_dirs = tuple(Path(os.path.realpath(folder)) for folder in settings.allowed_dirs)


def endpoint_plugin() -> Fp8ExtEndpoints:
    """The entry point that vLLM calls."""
    return Fp8ExtEndpoints()
