# SPDX-License-Identifier: Apache-2.0
"""Closes routes of vLLM's own that need no key and would harm blockfp8."""

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import JSONResponse

CLOSED = {
    "/scale_elastic_ep": "elastic expert parallelism moves experts between ranks, away from where updates look for them"
}
"""Routes that are refused to everybody, and why."""


def close_routes(app: FastAPI) -> None:
    """Answer each closed route with 403, as vLLM answers for disabled ones."""
    for path, reason in CLOSED.items():
        app.add_api_route(path, _refusal(path, reason), methods=["POST"], include_in_schema=False)


def _refusal(path: str, reason: str) -> Callable[[], JSONResponse]:
    message = f"{path} is closed on a blockfp8 server: {reason}"
    error = {"message": message, "type": "PermissionDeniedError", "param": None, "code": 403}

    def refuse() -> JSONResponse:
        return JSONResponse({"error": error}, status_code=403)

    return refuse
