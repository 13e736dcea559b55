# SPDX-License-Identifier: Apache-2.0
"""Writes the JSON of whole answers by pydantic's encoder.

It is eight times as fast as Python's where answers hold logprobs.

The routers of `/v1/completions`, `/v1/chat/completions` and `/inference/v1/generate` use the name `JSONResponse`.
"""

from functools import partial
from importlib import import_module
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import JSONResponse

from vllm_fp8ext.compat.speed import unchecked_models, written_logprobs
from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "json_responses"
WHY: str = (
    "Write answers fast: vLLM's routes make dictionaries of their models, and Python's encoder writes them."
)
GAIN: str = "8 times as fast where answers hold logprobs"
REPLACES: tuple[str, ...] = (
    "vllm.entrypoints.openai.completion.api_router:JSONResponse",
    "vllm.entrypoints.openai.chat_completion.api_router:JSONResponse",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router:JSONResponse",
    "vllm.entrypoints.openai.completion.api_router:completion(request)",
    "vllm.entrypoints.openai.chat_completion.api_router:chat(request)",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router:generate_tokens(request)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's routes write their models as JSON at once"

ROUTERS: dict[str, tuple[str, str]] = {
    "vllm.entrypoints.openai.completion.api_router": ("completion", "create_completion"),
    "vllm.entrypoints.openai.chat_completion.api_router": ("chat", "create_chat_completion"),
    "vllm.entrypoints.scale_out.token_in_token_out.api_router": ("generate_tokens", "serve_tokens"),
}
"""Modules of routes: the function that returns what answers a request, and its method that does."""
_NUMBERS = (b"NaN", b"Infinity")
"""Words that JSON has no number for, and Starlette refuses."""


class FastJSONResponse(JSONResponse):
    """Starlette's `JSONResponse`, encoded faster. What it refuses is refused likewise."""

    def render(self, content: Any) -> bytes:
        writing = written_logprobs.end()
        body = self._encode(content)
        return body if writing is None else writing.fill(body)

    def _encode(self, content: Any) -> bytes:
        try:
            body = to_json(content, inf_nan_mode="constants")
        except PydanticSerializationError:
            return super().render(content)
        return super().render(content) if any(word in body for word in _NUMBERS) else body


class _Answering:
    """Answers requests as a handler of vLLM's does; whole answers go to `FastJSONResponse` next, in the same task."""

    def __init__(self, handler: Any, method: str) -> None:
        self._handler = handler
        setattr(self, method, partial(self._answer, getattr(handler, method)))

    async def _answer(self, method: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not request.stream:
            written_logprobs.begin()
        return await method(request, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


def _wrap_handler(original: Any) -> Any:
    method = dict(ROUTERS.values())[original.__name__]

    def handler(request: Any) -> Any:
        serving = original(request)
        return None if serving is None else _Answering(serving, method)

    return handler


def install() -> None:
    """Idempotent."""
    completion, chat, generate = map(import_module, ROUTERS)
    for module in (completion, chat, generate):
        module.JSONResponse = FastJSONResponse  # type: ignore[attr-defined]
    wrap(completion, "completion", _wrap_handler)
    wrap(chat, "chat", _wrap_handler)
    wrap(generate, "generate_tokens", _wrap_handler)
    unchecked_models.install()
