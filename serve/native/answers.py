# SPDX-License-Identifier: Apache-2.0
"""Answers of vLLM's own weight routes: vLLM's bodies, and errors in its form, which trainers print."""

import logging
from collections.abc import Awaitable, Callable
from traceback import format_exc
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.log_text import shown
from vllm_fp8ext.serve.body_process import BodyProcess
from vllm_fp8ext.serve.native.access import NativeAccess

logger = logging.getLogger("vllm.fp8ext")

Endpoint = Callable[[Request], Awaitable[Any]]
_DIGITS = 18


def error_answer(error: UpdateError) -> JSONResponse:
    """Return an error in the form of vLLM's servers, and its details beside it."""
    body = {"message": str(error), "type": error.kind, "param": None, "code": error.status}
    headers = {"WWW-Authenticate": 'Bearer, Basic realm="fp8ext"'} if error.status == 401 else None
    return JSONResponse({"error": body, **error.details}, status_code=error.status, headers=headers)


def closed(message: str) -> JSONResponse:
    """Return the answer of a route that nobody may call (403)."""
    error = {"message": message, "type": "PermissionDeniedError", "param": None, "code": 403}
    return JSONResponse({"error": error}, status_code=403)


def guarded(endpoint: Endpoint, access: NativeAccess, refused: Callable[[str], None]) -> Endpoint:
    """Ask who calls before anything is read, and answer every refusal in vLLM's form. `refused` is told the kind of each."""

    async def answer(request: Request) -> Response:
        try:
            access.check(request)
            content = await endpoint(request)
            return content if isinstance(content, Response) else JSONResponse(content)
        except UpdateError as error:
            refusal = error
        except Exception as error:
            trace = "\n".join(map(shown, format_exc().splitlines()))
            logger.error("fp8ext: %s %s failed\n%s", request.method, shown(request.scope["path"]), trace)
            refusal = UpdateError("internal", f"{type(error).__name__}: {error}", status=500)
        refused(refusal.kind)
        return error_answer(refusal)

    return answer


async def body_of(request: Request, form: str, bodies: BodyProcess) -> dict[str, Any]:
    """Return the fields of a JSON body of this model of `serve.native.schema`; an empty body is an empty object.

    Raises:
        UpdateError: `length-required`, `body-too-large`, `invalid-request`.
    """
    if "transfer-encoding" in request.headers:
        raise UpdateError("length-required", "expected a Content-Length header", status=411)
    length, limit = request.headers.get("content-length", "0"), bodies.limits.json_bytes
    if not length.isdecimal() or len(length) > _DIGITS or int(length) > limit:
        message = f"a JSON body may have {limit} bytes here, found {length:.30}"
        raise UpdateError("body-too-large", message, status=413, limit=limit)
    content = await request.body() or b"{}"
    return await bodies.json(f"vllm_fp8ext.serve.native.schema:{form}", content)


def choice(request: Request, name: str, allowed: tuple[str, ...], default: str) -> str:
    """Return a query parameter that has one of a few values.

    Raises:
        UpdateError: `invalid-request` (400), as vLLM answers.
    """
    value = request.query_params.get(name, default)
    if value not in allowed:
        raise UpdateError(
            "invalid-request", f"{name}: expected {', '.join(allowed)}, found {value!r:.100}", status=400
        )
    return value


def flag(request: Request, name: str, default: bool) -> bool:
    """Return a query parameter that is true or false."""
    return choice(
        request, name, ("true", "false", "1", "0", "True", "False"), str(default).lower()
    ).lower() in ("true", "1")
