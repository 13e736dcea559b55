# SPDX-License-Identifier: Apache-2.0
"""Errors as RFC 9457 problem documents."""

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.schema import PROBLEM, Problem

MEDIA_TYPE = "application/problem+json"

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": description, "content": {MEDIA_TYPE: {}}}
    for status, description in (
        (400, "The body is broken"),
        (401, "No admin key"),
        (403, "Wrong admin key, or a path that is not allowed"),
        (404, "No such update, or no such file"),
        (409, "Not in this state"),
        (411, "No Content-Length"),
        (413, "The chunk is too large"),
        (422, "The tensors, or the request, are not what the engine takes"),
        (500, "The engine failed"),
        (504, "The engine did not answer in time"),
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


async def on_update_error(_: Request, error: Exception) -> JSONResponse:
    """Exception handler of the API server."""
    assert isinstance(error, UpdateError)
    return problem(error)
