# SPDX-License-Identifier: Apache-2.0
"""Refuses whatever asks for the routes without the admin key before other middleware sees it.

Unknown paths, other methods and paths with a slash too many reach no route of ours. Other middleware counts them all the
same: vLLM's metrics keep a series for each path that a redirect would mend.
"""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.problems import problem
from vllm_fp8ext.serve.schema import PREFIX


class KeyGuard:
    """ASGI middleware; `refused` is told the kind of each refusal."""

    def __init__(self, app: ASGIApp, key: AdminKey, refused: Callable[[str], None]) -> None:
        self._app = app
        self._key = key
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and asks_for_ours(scope):
            try:
                self._key.check(Headers(scope=scope).get("authorization"))
            except UpdateError as error:
                self._refused(error.kind)
                await problem(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def asks_for_ours(scope: Scope) -> bool:
    """Tell whether a request's path is one of `PREFIX`, or below it."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == PREFIX or path.startswith(PREFIX + "/")
