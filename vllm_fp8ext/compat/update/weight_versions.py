# SPDX-License-Identifier: Apache-2.0
"""Shows in answers which weights sampled which tokens.

These are the answers of `/v1/completions`, `/v1/chat/completions`, its `/batch` and `/inference/v1/generate`. Each finished
choice gets `weight_versions`: `[{"version", "epoch", "instance", "start", "end"}, …]` over its output tokens, in its final
chunk when streaming. vLLM 0.33 has the field too, without epochs, and fills it where a request asks.
"""

import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from vllm.outputs import WeightVersionSpan
from vllm.v1.engine.output_processor import RequestState

from vllm_fp8ext.compat.features import is_available
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.update.contract.labels import Label, Step

FEATURE: str = "weight_versions"
WHY: str = "Show weight versions: vLLM's spans have no epochs, and one label for all requests of a step."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.engine.output_processor:RequestState.track_weight_version(weight_version)",
    "vllm.v1.engine.output_processor:RequestState._weight_version_spans",
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.completion_stream_generator("
    "request, result_generator)",
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.request_output_to_completion_response("
    "final_res_batch)",
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator("
    "request, result_generator)",
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator("
    "result_generator)",
    "vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch.chat_completion_full_generator_batch("
    "request, generators)",
)
USES: dict[str, tuple[str, ...]] = {
    "say which weights computed the K and V of a request": (
        "vllm.v1.engine.output_processor:RequestState.weight_version_starts",
    ),
    "show weight versions": (
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTokensChoice",
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTextChoice",
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTokensStreamChoice",
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTextStreamChoice",
        "vllm.outputs:WeightVersionSpan(version, start, end)",
        "vllm.entrypoints.openai.completion.protocol:CompletionResponse",
        "vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice",
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse",
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponseChoice",
    ),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/54443"
REMOVE_WHEN: str = "vLLM's spans have epochs, tell of K and V, and every response can have them"

_FINISHED = '"finish_reason":"'
LABEL = "fp8ext_label"
"""Attribute of a span whose version is not its label."""


@dataclass
class EpochSpan(WeightVersionSpan):
    """vLLM's span, with the server's epoch, and the life of the engine that counts it."""

    epoch: int = 0
    instance: str | None = None

    @classmethod
    def of(cls, span: WeightVersionSpan) -> Self:
        """Make one of vLLM's, whose version is a label. That stays with it (`label_of`), and no answer shows it."""
        label = Label.decode(span.version)
        made = cls(label.version, span.start, span.end, label.epoch, label.instance or None)
        setattr(made, LABEL, label)
        return made


def label_of(span: WeightVersionSpan) -> Label:
    """Read the label of vLLM's span, or of one that `EpochSpan.of` made."""
    label: Label | None = getattr(span, LABEL, None)
    return label or Label.decode(span.version)


_SPANS = list[EpochSpan] | None


def track() -> None:
    """Read what a step says of its tokens, where the requests' states are. Idempotent."""
    wrap(RequestState, "track_weight_version", _wrap_track_weight_version)


def install() -> None:
    """Idempotent."""
    track()
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion import protocol as completion
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.scale_out.token_in_token_out import protocol as generate

    _declare(completion.CompletionResponseChoice, completion.CompletionResponse)
    _declare(chat.ChatCompletionResponseChoice, chat.ChatCompletionResponse)
    _declare(generate.GenerateTokensChoice, generate.GenerateTokensResponse)
    _declare(generate.GenerateTextChoice, generate.GenerateTextResponse)
    _declare(generate.GenerateTokensStreamChoice, generate.GenerateTokensStreamResponse)
    _declare(generate.GenerateTextStreamChoice, generate.GenerateTextStreamResponse)
    wrap(RequestState, "_weight_version_spans", _wrap_spans)
    wrap(OpenAIServingCompletion, "completion_stream_generator", _wrap_stream)
    wrap(OpenAIServingCompletion, "request_output_to_completion_response", _wrap_completion_response)
    wrap(OpenAIServingChat, "chat_completion_stream_generator", _wrap_stream)
    wrap(OpenAIServingChat, "chat_completion_full_generator", _wrap_chat_response)
    wrap(OpenAIServingChatBatch, "chat_completion_full_generator_batch", _wrap_batch_response)
    if is_available("beam_versions"):
        from vllm_fp8ext.compat.update import beam_versions

        beam_versions.install()
    if is_available("dialect_versions"):
        from vllm_fp8ext.compat.update import dialect_versions

        dialect_versions.install()


def _declare(choice: Any, response: Any) -> None:
    """Give the field, where a choice has it, its type, by which it is serialized."""
    field = choice.model_fields.get("weight_versions")
    if field is not None and field.annotation != _SPANS:
        field.annotation = _SPANS
        choice.model_rebuild(force=True)
        response.model_rebuild(force=True)


def _wrap_track_weight_version(original: Any) -> Any:
    def track_weight_version(self: Any, weight_version: str) -> None:
        step = Step.decode(weight_version)
        starts = self.weight_version_starts
        for label in step.held.get(self.request_id, ()):
            if all(label != seen for seen, _ in starts):
                starts.append((label, self.detokenizer.num_output_tokens()))
        original(self, step.label)

    return track_weight_version


def _wrap_spans(original: Any) -> Any:
    def spans(self: Any) -> list[EpochSpan] | None:
        native = original(self)
        return None if native is None else [EpochSpan.of(span) for span in native]

    return spans


def _wrap_completion_response(original: Any) -> Any:
    def build(self: Any, final_res_batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        response = original(self, final_res_batch, *args, **kwargs)
        _attach(response, (output for result in final_res_batch for output in result.outputs))
        return response

    return build


def _wrap_chat_response(original: Any) -> Any:
    async def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs: list[Any] = []

        async def tap(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for result in results:
                outputs[:] = result.outputs
                yield result

        response = await _call(original, self, tap, args, kwargs)
        _attach(response, outputs)
        return response

    return build


def _wrap_batch_response(original: Any) -> Any:
    async def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        generators = bound.arguments["generators"]
        outputs: list[list[Any]] = [[] for _ in generators]

        async def tap(place: int, results: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for result in results:
                outputs[place] = result.outputs
                yield result

        bound.arguments["generators"] = [tap(place, results) for place, results in enumerate(generators)]
        response = await original(*bound.args, **bound.kwargs)
        _attach(response, (output for some in outputs for output in some))
        return response

    return build


def _wrap_stream(original: Any) -> Any:
    async def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        spans: dict[int, Any] = {}

        async def tap(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for item in results:
                prompt, result = item if isinstance(item, tuple) else (0, item)
                for output in result.outputs:
                    if output.weight_versions is not None:
                        spans[output.index + prompt * choices] = output.weight_versions
                yield item

        bound = inspect.signature(original).bind(self, *args, **kwargs)
        choices = bound.arguments["request"].n or 1
        async for event in _call(original, self, tap, args, kwargs):
            yield _annotated(event, spans) if spans and _FINISHED in event else event

    return stream


def _call(original: Any, self: Any, tap: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.arguments["result_generator"] = tap(bound.arguments["result_generator"])
    return original(*bound.args, **bound.kwargs)


def _attach(response: Any, outputs: Iterable[Any]) -> None:
    for choice, output in zip(getattr(response, "choices", ()), outputs, strict=False):
        if output.weight_versions is not None:
            declared = "weight_versions" in type(choice).model_fields
            spans = output.weight_versions
            choice.weight_versions = spans if declared else [asdict(span) for span in spans]


def _annotated(event: str, spans: dict[int, Any]) -> str:
    prefix, _, body = event.partition("data: ")
    data = json.loads(body)
    for choice in data.get("choices", ()):
        if choice.get("finish_reason") is not None and choice["index"] in spans:
            choice["weight_versions"] = [asdict(span) for span in spans.pop(choice["index"])]
    return f"{prefix}data: {json.dumps(data, separators=(',', ':'), ensure_ascii=False)}\n\n"
