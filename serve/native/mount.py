# SPDX-License-Identifier: Apache-2.0
"""Mounts vLLM's weight routes behind a key, and closes the rest of its dev mode."""

import logging
import os
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.native.access import NativeAccess
from vllm_fp8ext.serve.native.answers import Endpoint, closed, guarded
from vllm_fp8ext.serve.native.areal import ArealRoutes
from vllm_fp8ext.serve.native.control import ControlRoutes
from vllm_fp8ext.serve.native.prime_rl import PrimeRlRoutes
from vllm_fp8ext.serve.native.transfer import TransferRoutes

logger = logging.getLogger("vllm.fp8ext")

DIALECTS = (TransferRoutes, ControlRoutes, PrimeRlRoutes, ArealRoutes)
"""Calls that trainers know: vLLM's, and some trainers' own."""
_OPEN_MODULES = ("vllm.entrypoints.serve.dev", "vllm.entrypoints.rl")
"""Modules whose routes need no key and can change what is served."""


def mount(app: FastAPI, backend: Backend, access: NativeAccess) -> frozenset[str]:
    """Add the routes, each behind `access`, and close all others of vLLM's dev mode; return their paths."""
    routes = [dialect(backend) for dialect in DIALECTS]
    ours: set[tuple[str, str]] = set()
    for method, listed in (
        ("POST", [route.posts for route in routes]),
        ("GET", [route.gets for route in routes]),
    ):
        for endpoints in listed:
            for path, endpoint in endpoints.items():
                ours.add((path, method))
                _add(app, path, method, guarded(endpoint, access, backend.metrics.refused))
    _close_others(app, ours)
    return frozenset(path for path, _ in ours)


def _add(app: FastAPI, path: str, method: str, endpoint: Endpoint) -> None:
    async def answer(request: Request) -> Response:
        response: Response = await endpoint(request)
        return response

    app.add_api_route(path, answer, methods=[method], include_in_schema=False)


def _close_others(app: FastAPI, ours: set[tuple[str, str]]) -> None:
    closed = []
    for route in list(app.routes):
        if not isinstance(route, APIRoute) or not route.endpoint.__module__.startswith(_OPEN_MODULES):
            continue
        methods = sorted(method for method in route.methods if (route.path, method) not in ours)
        if methods:
            closed.append(route.path)
            app.add_api_route(route.path, _refusal(route.path), methods=methods, include_in_schema=False)
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        logger.info(
            "fp8ext: VLLM_SERVER_DEV_MODE: weight routes are ours and need the admin key; closed: %s",
            ", ".join(sorted(closed)) or "none",
        )


def _refusal(path: str) -> Callable[[], Awaitable[Response]]:
    message = f"{path} is closed on a blockfp8 server: it needs no key, and is not one of the routes that trainers need"

    async def refuse() -> Response:
        return closed(message)

    return refuse
