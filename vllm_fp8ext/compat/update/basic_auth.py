# SPDX-License-Identifier: Apache-2.0
"""Lets the guard of `--api-key` take its key as the password of HTTP Basic."""

from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "core"
WHY: str = "Let one URL with a key in it reach all routes: trainers pass no header on."
GAIN: str = "convenience, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware.verify_token(headers)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's guard takes Basic passwords"

_password_of: list[Callable[[str | None], str | None]] = []
"""Functions that find a password in a header; the last one counts."""


def install(password_of: Callable[[str | None], str | None]) -> None:
    """Take what `password_of` finds in a header for the key. Idempotent."""
    _password_of.append(password_of)
    wrap(AuthenticationMiddleware, "verify_token", _wrap_verify_token)


def _wrap_verify_token(original: Any) -> Any:
    def verify_token(self: Any, headers: Headers) -> bool:
        password = _password_of[-1](headers.get("authorization"))
        if password is not None:
            headers = Headers({"authorization": f"Bearer {password}"})
        return bool(original(self, headers))

    return verify_token
