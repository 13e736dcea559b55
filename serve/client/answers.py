# SPDX-License-Identifier: Apache-2.0
"""Turns a response into the body of a success, or a problem document's error."""

from typing import TypeVar

import httpx
from pydantic import TypeAdapter

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client.network import PROXY
from vllm_fp8ext.serve.schema import PREFIX, PROBLEM

T = TypeVar("T")
_NOT_MOUNTED = "are the routes mounted? the server needs VLLM_PLUGINS=fp8ext and FP8EXT_ADMIN_KEY"
_NO_V1 = "expected the server's root as its URL, without the /v1 of the OpenAI API"


def parsed(response: httpx.Response, form: TypeAdapter[T]) -> T:
    """The body of a success.

    Raises:
        UpdateError: a refusal; of kind `http` when it, or a success, is not of this API.
    """
    if not response.is_success:
        raise _refusal(response)
    try:
        return form.validate_json(response.content)
    except ValueError as error:
        message = f"{_told(response)} (not an answer of this API: {str(error).splitlines()[0]})"
        raise UpdateError("http", message, status=response.status_code) from None


def _refusal(response: httpx.Response) -> UpdateError:
    """The error in a problem document, or in whatever else came back."""
    try:
        body = response.json()
        kind = str(body["type"])
        if not kind.startswith(PROBLEM):
            raise ValueError  # of somebody else, a proxy say
        details = {
            key: value for key, value in body.items() if key not in ("type", "title", "status", "detail")
        }
        return UpdateError(kind.removeprefix(PROBLEM), body["detail"], status=response.status_code, **details)
    except (ValueError, KeyError, TypeError):
        message = _told(response)
        if response.status_code == 404:
            openai = response.request.url.path.startswith(f"/v1{PREFIX}")
            message += f" ({_NO_V1 if openai else _NOT_MOUNTED})"
        return UpdateError("http", message, status=response.status_code)


def _told(response: httpx.Response) -> str:
    proxy = response.extensions.get(PROXY)
    way = f" through the proxy {proxy}" if proxy else ""
    return f"HTTP {response.status_code} from {response.request.url}{way}: {response.text[:200]}"
