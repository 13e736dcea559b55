# SPDX-License-Identifier: Apache-2.0
"""vLLM's endpoint plugin: mounts the routes when there is an admin key, and shows weight versions in responses."""

import asyncio
import atexit
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI

from vllm_fp8ext.compat.features import is_available
from vllm_fp8ext.compat.speed.serving_speed import install_answers
from vllm_fp8ext.compat.update.api_processes import call_at_end, let_requests_finish
from vllm_fp8ext.compat.update.basic_auth import install as take_basic_passwords
from vllm_fp8ext.compat.update.shutdown_answers import answer_at_the_end
from vllm_fp8ext.config import METHOD, Settings
from vllm_fp8ext.environment import ADMIN_KEY, key_of
from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.serve.auth import AdminKey, basic_password
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.closed_routes import close_routes
from vllm_fp8ext.serve.key_guard import KeyGuard
from vllm_fp8ext.serve.metrics import show_where_shared
from vllm_fp8ext.serve.native.access import NativeAccess
from vllm_fp8ext.serve.native.mount import mount as mount_native_routes
from vllm_fp8ext.serve.poison_guard import PoisonGuard
from vllm_fp8ext.serve.route_order import replacing
from vllm_fp8ext.serve.routes import router

logger = logging.getLogger("vllm.fp8ext")


class Fp8ExtEndpoints:
    """Implements vLLM's `EndpointPlugin` protocol."""

    name = "fp8ext"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._backend = Backend()
        self._access: NativeAccess | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Mount the routes under `/fp8ext/v1`, if there is a key to guard them with."""
        if is_available("weight_versions"):
            from vllm_fp8ext.compat.update import weight_versions

            weight_versions.install()
        show_where_shared(app, self._backend.metrics, self._backend.refresh_metrics)
        install_answers()
        blockfp8 = getattr(getattr(app.state, "args", None), "quantization", None) == METHOD
        if blockfp8:
            with replacing(app):
                close_routes(app)
            take_basic_passwords(basic_password)
        key = key_of(os.environ.get(ADMIN_KEY))
        admin_key = AdminKey(key) if key else None
        healing = frozenset[str]()
        if blockfp8:
            self._access = NativeAccess(admin_key)
            with replacing(app):
                healing = mount_native_routes(app, self._backend, self._access)
        if admin_key is None:
            logger.warning(
                "fp8ext: no weight-update routes, because %s is not set; set it to a secret to have them",
                ADMIN_KEY,
            )
            return
        refused = self._backend.metrics.refused
        app.include_router(router(admin_key, self._backend))
        app.add_middleware(KeyGuard, key=admin_key, refused=refused)
        app.add_middleware(
            PoisonGuard,
            reason=lambda: self._backend.poisoned,
            refresh=self._backend.refresh_status,
            healing=healing,
        )

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Connect the routes with the engine."""
        if engine_client is None:
            return
        backend = self._backend
        settings = Settings.parse(engine_client.vllm_config.additional_config)
        guarded = bool(key_of(os.environ.get(ADMIN_KEY)))
        if settings.ready == "when_current" and not guarded:
            raise ConfigError(f'"ready" "when_current": expected an admin key in {ADMIN_KEY}, found none')
        if self._access is not None:
            self._access.trust(settings.trusted_clients)
            guarded = self._access.possible
        backend.connect(engine_client, routes=guarded)
        several = backend.processes.count > 1
        answer_at_the_end(engine_client, self._drain(engine_client) if several else None)
        if several:
            await backend.join()
        atexit.register(backend.engine.end.require_clean)
        if guarded:
            atexit.register(backend.spool.close)
            call_at_end(backend.spool.close)
            try:
                await backend.require_room()
            except UpdateError as error:
                level = logging.INFO if error.kind == "updates-unavailable" else logging.ERROR
                logger.log(level, "fp8ext: no live updates: %s", error)
            self._looking = asyncio.create_task(backend.keep_refreshing())
            self._following = asyncio.create_task(backend.keep_following()) if several else None

    def _drain(self, engine_client: Any) -> Callable[[float], None]:
        loop, end = asyncio.get_running_loop(), self._backend.engine.end
        return partial(let_requests_finish, engine_client, loop, end)


def endpoint_plugin() -> Fp8ExtEndpoints:
    """The entry point that vLLM calls."""
    return Fp8ExtEndpoints()
