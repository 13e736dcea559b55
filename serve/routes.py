# SPDX-License-Identifier: Apache-2.0
"""The routes under `/fp8ext/v1`, in one table."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.security import HTTPBearer

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.handlers import Handlers
from vllm_fp8ext.serve.problems import RESPONSES, guarded_route
from vllm_fp8ext.update.transports.registry import TRANSPORTS
from vllm_fp8ext.update.transports.transport import Route

_OCTETS = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_UPDATE = "/updates/{id}"


@dataclass(frozen=True, kw_only=True)
class ApiRoute:
    """One row of the table."""

    call: str
    """Method and path."""
    endpoint: Callable[..., Any]
    response: Any
    """Model of the body of a success."""
    summary: str
    name: str | None = None
    """Name of the operation in the OpenAPI document; by default the endpoint's."""
    status: int = 200
    binary: bool = False
    """The request has a body of bytes."""

    def add_to(self, router: APIRouter) -> None:
        """Register the route."""
        method, path = self.call.split()
        body = {"requestBody": {"required": True, "content": _OCTETS}} if self.binary else None
        router.add_api_route(
            path,
            self.endpoint,
            methods=[method],
            response_model=self.response,
            status_code=self.status,
            summary=self.summary,
            name=self.name or self.endpoint.__name__,
            openapi_extra=body,
        )


def _served(do: Handlers) -> tuple[ApiRoute, ...]:
    """Return the routes that tell what is served."""
    return (
        ApiRoute(call="GET /weights", endpoint=do.weights, response=schema.Weights, summary="What is served"),
        ApiRoute(
            call="GET /weights/manifest",
            endpoint=do.manifest,
            response=dict[str, Any],
            summary="What an update must bring",
        ),
        ApiRoute(
            call="GET /weights/kv-scales",
            endpoint=do.kv_scales,
            response=schema.KvScalesServed,
            summary="Scales of the FP8 KV cache that is served",
        ),
        ApiRoute(
            call="GET /weights/digests",
            endpoint=do.digests,
            response=schema.Digests,
            summary="Digests of what is served",
        ),
        ApiRoute(
            call="POST /weights/verify",
            endpoint=do.verify,
            response=schema.Verified,
            summary="Compare what is served with what was committed",
        ),
        ApiRoute(
            call="POST /weights/current",
            endpoint=do.declare_current,
            response=schema.Weights,
            summary="Say that what is loaded is what the other servers serve",
        ),
    )


def _chunks(do: Handlers) -> Iterator[ApiRoute]:
    """Yield the routes by which tensors come; those of transports are in their registry."""
    yield ApiRoute(
        call=f"PUT {_UPDATE}/chunks/{{n}}",
        endpoint=do.put_chunk,
        response=schema.Update,
        summary="Send tensors as one safetensors body",
        binary=True,
    )
    yield ApiRoute(
        call=f"POST {_UPDATE}/files",
        endpoint=do.post_files,
        response=schema.Update,
        summary="Read tensors from the server's disk",
    )
    yield from (
        _announced(do, transport.route) for transport in TRANSPORTS.values() if transport.route is not None
    )


def _announced(do: Handlers, route: Route) -> ApiRoute:
    return ApiRoute(
        call=f"POST {_UPDATE}/{route.path}",
        endpoint=do.announced(route),
        response=schema.Update,
        summary=route.summary,
        name=f"post_{route.path}",
        status=200 if route.waits else 202,
    )


def _updates(do: Handlers) -> tuple[ApiRoute, ...]:
    """Return the routes of updates, in the order in which they are called."""
    update = schema.Update
    return (
        ApiRoute(
            call="POST /updates",
            endpoint=do.open_update,
            response=update,
            summary="Open an update",
            status=201,
        ),
        ApiRoute(
            call=f"GET {_UPDATE}",
            endpoint=do.get_update,
            response=update,
            summary="Where an update stands",
        ),
        *_chunks(do),
        ApiRoute(
            call=f"POST {_UPDATE}/prepare",
            endpoint=do.prepare,
            response=update,
            summary="Validate the whole update",
        ),
        ApiRoute(
            call=f"POST {_UPDATE}/commit",
            endpoint=do.commit,
            response=update,
            summary="Serve the new weights",
        ),
        ApiRoute(call=f"DELETE {_UPDATE}", endpoint=do.abandon, response=update, summary="Give an update up"),
    )


def _engine(do: Handlers) -> tuple[ApiRoute, ...]:
    """Return the routes that change what the engine serves, or holds, in one call."""
    return (
        ApiRoute(
            call="POST /rollback",
            endpoint=do.rollback,
            response=schema.Committed,
            summary="Serve the previous weights again",
        ),
        ApiRoute(
            call="POST /sleep",
            endpoint=do.sleep,
            response=schema.Weights,
            summary="Give the GPU's memory back",
        ),
        ApiRoute(
            call="POST /wake",
            endpoint=do.wake,
            response=schema.Weights,
            summary="Take the GPU's memory again",
        ),
        ApiRoute(
            call="POST /load",
            endpoint=do.load,
            response=schema.Update,
            summary="Update from the server's disk in one call",
        ),
    )


def router(key: AdminKey, backend: Backend) -> APIRouter:
    """Return all routes, behind the admin key."""
    documented = HTTPBearer(auto_error=False, scheme_name="fp8extAdminKey", description="FP8EXT_ADMIN_KEY")
    routes = APIRouter(
        prefix=schema.PREFIX,
        tags=["fp8ext"],
        dependencies=[Depends(documented)],
        responses=RESPONSES,
        route_class=guarded_route(key, backend.metrics.refused, backend.bodies),
    )
    handlers = Handlers(backend)
    for route in (*_served(handlers), *_updates(handlers), *_engine(handlers)):
        route.add_to(routes)
    return routes
