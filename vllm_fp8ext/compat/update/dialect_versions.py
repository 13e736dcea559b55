# SPDX-License-Identifier: Apache-2.0
"""Shows weight versions in answers of `/v1/responses` and `/v1/messages`.

A response has the spans of all of its turns, over their tokens one turn after the other. A stream has them in its last event
but one of `/v1/messages`, `message_delta`, and in `response.completed`.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses import context as contexts
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "dialect_versions"
WHY: str = "Show weight versions in responses and messages: vLLM's have no field for them."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.entrypoints.openai.responses.context:SimpleContext.append_output(output)",
    "vllm.entrypoints.openai.responses.context:ParsableContext.append_output(output)",
    "vllm.entrypoints.openai.responses.context:HarmonyContext.append_output(output)",
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.responses_full_generator(context)",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.messages_full_converter(generator)",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.message_stream_converter(generator)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/54443"
REMOVE_WHEN: str = "vLLM's responses and messages have weight versions with epochs"
NEEDS: tuple[str, ...] = ("weight_versions",)

_SPANS = "fp8ext_spans"
"""Attribute of a context: spans of the turns that have ended."""
_FIELD = '"weight_versions"'


class MessagesResponse(AnthropicMessagesResponse):
    """A message, and which weights sampled its tokens."""

    weight_versions: list[dict[str, Any]] | None = None


def install() -> None:
    """Idempotent."""
    for name in ("SimpleContext", "ParsableContext", "HarmonyContext"):
        wrap(getattr(contexts, name), "append_output", _wrap_append_output)
    wrap(OpenAIServingResponses, "responses_full_generator", _wrap_responses_full_generator)
    wrap(AnthropicServingMessages, "messages_full_converter", _wrap_messages_full_converter)
    wrap(AnthropicServingMessages, "message_stream_converter", _wrap_message_stream_converter)


def _wrap_append_output(original: Any) -> Any:
    def append_output(self: Any, output: Any) -> None:
        original(self, output)
        ended = output.outputs[0].weight_versions if output.outputs else None
        if ended:
            spans = self.__dict__.setdefault(_SPANS, [])
            begin = spans[-1].end if spans else 0
            spans += [replace(span, start=span.start + begin, end=span.end + begin) for span in ended]

    return append_output


def _wrap_responses_full_generator(original: Any) -> Any:
    async def responses_full_generator(
        self: Any,
        request: Any,
        sampling_params: Any,
        result_generator: Any,
        context: Any,
        *args: Any,
        **more: Any,
    ) -> Any:
        response = await original(self, request, sampling_params, result_generator, context, *args, **more)
        spans = getattr(context, _SPANS, None)
        if spans and isinstance(response, ResponsesResponse):
            response.weight_versions = [asdict(span) for span in spans]  # it takes more fields
        return response

    return responses_full_generator


def _wrap_messages_full_converter(original: Any) -> Any:
    def messages_full_converter(self: Any, generator: Any) -> Any:
        message = original(self, generator)
        spans = getattr(generator.choices[0], "weight_versions", None)
        if not spans:
            return message
        told = [span if isinstance(span, dict) else asdict(span) for span in spans]
        return MessagesResponse(**message.__dict__, weight_versions=told)

    return messages_full_converter


def _wrap_message_stream_converter(original: Any) -> Any:
    async def message_stream_converter(self: Any, generator: Any) -> AsyncIterator[str]:
        spans: list[Any] = []

        async def tap() -> AsyncIterator[str]:
            async for chunk in generator:
                if _FIELD in chunk:
                    spans[:] = _spans_in(chunk) or spans
                yield chunk

        async for event in original(self, tap()):
            if spans and event.startswith("event: message_delta"):
                head, separator, body = event.partition("data: ")
                told = {**json.loads(body), "weight_versions": spans}
                yield f"{head}{separator}{json.dumps(told, separators=(',', ':'), ensure_ascii=False)}\n\n"
            else:
                yield event

    return message_stream_converter


def _spans_in(chunk: str) -> list[Any] | None:
    """Return the spans in a chunk of a chat's stream."""
    try:
        choices = json.loads(chunk.partition("data:")[2])["choices"]
    except (ValueError, KeyError):
        return None
    return next((choice["weight_versions"] for choice in choices if choice.get("weight_versions")), None)
