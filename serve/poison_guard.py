# SPDX-License-Identifier: Apache-2.0
"""Answers 503 for a server whose engine is poisoned: nobody may take for an answer what no known weights have made."""

from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.problems import problem

_OPEN = ("/fp8ext/", "/metrics", "/version", "/openapi.json", "/docs", "/redoc")
"""What a poisoned server still answers: all that heals it or looks at it."""


class PoisonGuard:
    """ASGI middleware; `reason` tells why the engine is poisoned, or None."""

    def __init__(self, app: ASGIApp, reason: Callable[[], str | None]) -> None:
        self._app = app
        self._reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._reason() if scope["type"] in ("http", "websocket") else None
        if reason is None or scope["path"].removeprefix(scope.get("root_path", "")).startswith(_OPEN):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013, "reason": "poisoned"})
        else:
            await problem(_refusal(reason))(scope, receive, send)


def _refusal(reason: str) -> UpdateError:
    message = f"the engine is poisoned until a full update is committed: {reason}"
    # clients of the OpenAI API read the member `error`
    openai: dict[str, Any] = {"message": message, "type": "poisoned", "param": None, "code": 503}
    return UpdateError("poisoned", message, status=503, error=openai)
