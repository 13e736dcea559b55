# SPDX-License-Identifier: Apache-2.0
"""Errors as RFC 9457 problem documents."""

import logging
import re
from collections.abc import Callable, Coroutine
from traceback import format_exc
from typing import Any, get_args, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.log_text import shown
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.body_checks import invalid_request
from vllm_fp8ext.serve.body_process import BodyProcess
from vllm_fp8ext.serve.schema import PROBLEM, Problem
from vllm_fp8ext.update.contract.update_errors import listed

logger = logging.getLogger("vllm.fp8ext")

MEDIA_TYPE = "application/problem+json"
_JSON = re.compile(r"application/(\S+\+)?json", re.IGNORECASE)
_DIGITS = 18
"""Digits of the largest length that is looked at; Python refuses to read very long numbers."""

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}}
    for status, description in (
        (400, "The body is broken"),
        (401, "No admin key"),
        (403, "Wrong admin key, or a path that is not allowed"),
        (404, "No such update, or no such file"),
        (408, "The body stopped coming"),
        (409, "Not in this state"),
        (410, "The update expired"),
        (411, "No Content-Length"),
        (413, "The body is too large"),
        (415, "A compressed body"),
        (422, "The tensors, or the request, are not what the engine takes"),
        (500, "The engine failed"),
        (503, "The engine is poisoned, or has no weights"),
        (504, "The engine did not answer in time"),
        (507, "Out of memory, or the spool folder is full"),
    )
}


def problem(error: UpdateError) -> JSONResponse:
    """The response for a refused call."""
    body = {
        **error.details,
        "type": PROBLEM + error.kind,
        "title": error.kind.replace("-", " "),
        "status": error.status,
        "detail": str(error),
    }
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(body, status_code=error.status, media_type=MEDIA_TYPE, headers=headers)


def guarded_route(key: AdminKey, refused: Callable[[str], None], bodies: BodyProcess) -> type[APIRoute]:
    """Return a route class that asks for the key before it reads anything. JSON bodies are checked by `bodies`, and every
    refusal is answered with a problem document. The parameter `body` of an endpoint has plain values where its model has
    others nested.

    `refused` is told the kind of each.
    """

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle, form = super().get_route_handler(), _form(self.endpoint)

            async def guarded(request: Request) -> Response:
                try:
                    key.check(request.headers.get("authorization"))
                    _require_plain(request)
                    if request.method == "POST":
                        _require_bounded(request, bodies.limits.json_bytes)
                        if form is not None:
                            request = await _checked(request, form, bodies)
                    return await handle(request)
                except UpdateError as error:
                    refusal = error
                except RequestValidationError as error:
                    refusal = invalid_request(list(error.errors()))
                except HTTPException as error:  # FastAPI's own, for a body that is not text
                    refusal = UpdateError("invalid-request", str(error.detail), status=error.status_code)
                except Exception as error:
                    trace = "\n".join(map(shown, format_exc().splitlines()))
                    logger.error(
                        "fp8ext: %s %s failed\n%s", request.method, shown(request.scope["path"]), trace
                    )
                    refusal = UpdateError("internal", f"{type(error).__name__}: {error}", status=500)
                refused(refusal.kind)
                return problem(refusal)

            return guarded

    return GuardedRoute


def _require_plain(request: Request) -> None:
    encoding = ", ".join(request.headers.getlist("content-encoding"))
    if encoding.strip().lower() not in ("", "identity"):
        message = f"Content-Encoding: expected none (a body as it is), found {encoding!r:.200}"
        raise UpdateError("unsupported-encoding", message, status=415)


class _CheckedRequest(Request):
    """A request whose body has become a model already."""

    def __init__(self, request: Request, body: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._checked_body = body

    async def body(self) -> bytes:
        return b"{}"  # FastAPI only wants to know whether there is one

    async def json(self) -> Any:
        return self._checked_body


def _form(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """The model of an endpoint's parameter `body`, which may be optional."""
    body_type = get_type_hints(endpoint).get("body")
    forms = [body_type, *get_args(body_type)]
    return next((form for form in forms if isinstance(form, type) and issubclass(form, BaseModel)), None)


async def _checked(request: Request, form: type[BaseModel], bodies: BodyProcess) -> Request:
    content = await request.body()
    if not content:
        return request
    kind = request.headers.get("content-type", "")
    if not _JSON.fullmatch(kind.partition(";")[0].strip()):
        problems = [{"where": "body", "message": "expected the header Content-Type: application/json"}]
        message = f"Content-Type: expected application/json, found {kind!r:.200}"
        raise UpdateError("invalid-request", message, status=422, **listed(problems))
    fields = await bodies.json(f"{form.__module__}:{form.__qualname__}", content)
    return _CheckedRequest(request, form.model_construct(**fields))


def _require_bounded(request: Request, limit: int) -> None:
    if "transfer-encoding" in request.headers:
        raise UpdateError("length-required", "expected a Content-Length header", status=411)
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > _DIGITS or int(length) > limit:
        message = f"a JSON body may have {limit} bytes here, found {length:.30}"
        raise UpdateError("body-too-large", message, status=413, limit=limit)
