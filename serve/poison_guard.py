# SPDX-License-Identifier: Apache-2.0
"""Answers 503 for a server whose engine is poisoned, or has no weights yet: such answers no known weights have made.

An engine that has just been poisoned fails the requests that it has: their answers, 500, may come before this server
knows why.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.problems import problem
from vllm_fp8ext.update.contract.update_errors import NO_WEIGHTS, not_generating

_OPEN = ("/fp8ext/", "/metrics", "/version", "/openapi.json", "/docs", "/redoc")
"""Paths that a poisoned server still answers: all that heals it or looks at it."""
_HEALTH = "/health"
"""Path that a server without weights answers: trainers wait for it before they send any."""

_REFRESH_SECONDS = 5.0
"""Longest time that a failed request waits to be told why."""


class PoisonGuard:
    """ASGI middleware; `reason` tells why the engine is poisoned, or None, as `refresh` has found last.

    `healing`: paths by which weights come otherwise, which stay open.
    """

    def __init__(
        self,
        app: ASGIApp,
        reason: Callable[[], str | None],
        refresh: Callable[[], Awaitable[Any]],
        healing: Collection[str] = (),
    ) -> None:
        self._healing = healing
        self._app = app
        self._reason = reason
        self._refresh = refresh

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._reason() if scope["type"] in ("http", "websocket") else None
        if scope["type"] not in ("http", "websocket") or self._is_open(scope, reason):
            await self._app(scope, receive, send)
        elif reason is None:
            await self._app(scope, receive, self._explained(scope, receive, send))
        elif scope["type"] == "websocket":
            kind = not_generating(reason).kind
            await send({"type": "websocket.close", "code": 1013, "reason": kind})
        else:
            await problem(not_generating(reason))(scope, receive, send)

    def _explained(self, scope: Scope, receive: Receive, send: Send) -> Send:
        """`send`, but 503 for a 500 of an engine that was poisoned meanwhile."""
        refused = False

        async def send_explained(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 500:
                with contextlib.suppress(TimeoutError, UpdateError):  # it may have ended
                    async with asyncio.timeout(_REFRESH_SECONDS):
                        await self._refresh()
                reason = self._reason()
                if reason is not None:
                    refused = True
                    await problem(not_generating(reason))(scope, receive, send)
            if not refused:
                await send(message)

        return send_explained

    def _is_open(self, scope: Scope, reason: str | None) -> bool:
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        health = reason == NO_WEIGHTS and path == _HEALTH
        return path.startswith(_OPEN) or path in self._healing or health
