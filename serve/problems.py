# SPDX-License-Identifier: Apache-2.0
"""Errors as RFC 9457 problem documents."""

import logging
from collections.abc import Callable, Coroutine
from traceback import format_exc
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.schema import PROBLEM, Problem
from vllm_fp8ext.shown import shown
from vllm_fp8ext.weights.refusals import PROBLEMS_LISTED, listed

logger = logging.getLogger("vllm.fp8ext")

MEDIA_TYPE = "application/problem+json"

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
        (503, "The engine is poisoned"),
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


_SHOWN = 300
"""Characters of a client's own text that an answer repeats: names of fields are its own, too."""
BODY_LIMIT = 64 << 20
"""Longest JSON body, in bytes: room for claims about 100,000 tensors."""


def guarded_route(key: AdminKey, refused: Callable[[str], None]) -> type[APIRoute]:
    """A route class that asks for the key before it reads anything, and answers every refusal with a problem document.

    `refused` is told the kind of each.
    """

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    key.check(request.headers.get("authorization"))
                    _require_plain(request)
                    if request.method == "POST":
                        _require_bounded(request)
                    return await handle(request)
                except UpdateError as error:
                    refusal = error
                except RequestValidationError as error:
                    refusal = _invalid(error)
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


def _require_bounded(request: Request) -> None:
    if "transfer-encoding" in request.headers:
        raise UpdateError("length-required", "expected a Content-Length header", status=411)
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > BODY_LIMIT:
        message = f"a JSON body may have {BODY_LIMIT} bytes, found {length}"
        raise UpdateError("body-too-large", message, status=413, limit=BODY_LIMIT)


def _invalid(error: RequestValidationError) -> UpdateError:
    errors = error.errors()
    found = [
        {"where": f"{'.'.join(map(str, item['loc'])):.{_SHOWN}}", "message": f"{item['msg']:.{_SHOWN}}"}
        for item in errors[:PROBLEMS_LISTED]
    ]
    detail = "; ".join(f"{item['where']}: {item['message']}" for item in found)
    if len(errors) > len(found):
        detail += f"; and {len(errors) - len(found)} more"
    return UpdateError("invalid-request", detail, status=422, **listed(found, len(errors)))
