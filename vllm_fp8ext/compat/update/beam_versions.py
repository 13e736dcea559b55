# SPDX-License-Identifier: Apache-2.0
"""Says which weights sampled which tokens of beams, and ends beams at a commit.

vLLM asks for one token of each beam in each step, by a request of its own. What a request says of its weights is kept by the
tokens that it was asked with, and a beam's spans are put together from those of its steps. Between two steps no request runs
that a commit could end: what comes from weights that began with the end of all requests ends the search.
"""

import copy
import hashlib
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vllm.outputs import WeightVersionSpan

from vllm_fp8ext.compat.update.weight_versions import label_of
from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "beam_versions"
WHY: str = (
    "Say which weights sampled the tokens of beams: vLLM's spans know requests alone, and a "
    "beam is many of them."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search("
    "prompt, request_id, params)",
    "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search(prompts, params)",
)
USES: dict[str, tuple[str, ...]] = {
    "say which weights sampled the tokens of beams": (
        "vllm.entrypoints.common.offline:OfflineInferenceMixin._render_and_run_requests("
        "prompts, params, output_type)",
        "vllm.entrypoints.generate.beam_search.utils:BeamSearchSequence(orig_prompt, tokens, logprobs)",
    ),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/54443"
REMOVE_WHEN: str = "vLLM has spans for beams, and ends them with their requests"


class _Step(NamedTuple):
    spans: list[WeightVersionSpan]
    first: int
    """The epoch of the first step of its beam."""


class Lineage:
    """The steps of searches, by the tokens that they were asked with."""

    def __init__(self) -> None:
        self._steps: dict[bytes, _Step] = {}

    def take(self, result: Any) -> None:
        """Keep what the request of one step says of its weights. One of weights before which its search should have ended is
        marked as ended by `abort`, by which vLLM ends the search."""
        [output] = result.outputs
        spans, tokens = output.weight_versions, result.prompt_token_ids
        if not spans:
            return
        label = label_of(spans[-1])
        parent = self._steps.get(_hash(tokens[:-1]).digest())
        first = parent.first if parent else label.epoch
        if label.aborted > first:
            output.finish_reason = "abort"
            return
        key = _hash(tokens).digest()
        other = self._steps.get(key)  # of another search for the same prompt
        self._steps[key] = _Step([*other.spans, *spans] if other else spans, first)

    def spans(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[WeightVersionSpan] | None:
        """Return those of one beam, over its `tokens`; None where a step said nothing."""
        span_starts: list[tuple[WeightVersionSpan, int]] = []
        hashed = _hash(prompt)
        for place in range(len(tokens) + 1):
            step = self._steps.get(hashed.digest())
            if step is None and place < len(tokens):
                return None
            *held, newest = [replace(span, start=0, end=0) for span in step.spans] if step else [None]
            span_starts += [
                (span, place) for span in held if span and all(span != one for one, _ in span_starts)
            ]
            if newest and (not span_starts or span_starts[-1][0] != newest):
                span_starts.append((newest, place))
            if place < len(tokens):
                hashed.update(_bytes([tokens[place]]))
        starts = [*(start for _, start in span_starts), len(tokens)]
        return [replace(span, start=starts[n], end=starts[n + 1]) for n, (span, _) in enumerate(span_starts)]


def install() -> None:
    """Label the beams of servers. Idempotent."""
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

    wrap(BeamSearchOnlineMixin, "beam_search", _wrap_online)


def install_offline() -> None:
    """Label the beams of an `LLM`. Idempotent."""
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin

    wrap(BeamSearchOfflineMixin, "beam_search", _wrap_offline)


class _RecordingClient:
    """An engine's client, of whose answers a lineage is kept."""

    def __init__(self, client: Any, lineage: Lineage) -> None:
        self._client = client
        self._lineage = lineage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for result in self._client.generate(*args, **kwargs):
            self._lineage.take(result)
            yield result


def _wrap_online(original: Any) -> Any:
    async def beam_search(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        lineage, serving = Lineage(), copy.copy(self)
        serving.engine_client = _RecordingClient(self.engine_client, lineage)
        async for result in original(serving, *args, **kwargs):
            for output in result.outputs:
                output.weight_versions = lineage.spans(result.prompt_token_ids, output.token_ids)
            yield result

    return beam_search


def _wrap_offline(original: Any) -> Any:
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        lineage, llm, run = Lineage(), copy.copy(self), self._render_and_run_requests

        def noted(*args: Any, **kwargs: Any) -> Any:
            results = run(*args, **kwargs)
            for result in results:
                lineage.take(result)
            return results

        llm._render_and_run_requests = noted
        outputs = original(llm, *args, **kwargs)
        for output in outputs:
            for beam in output.sequences:
                original_prompt = beam.orig_prompt
                prompt = original_prompt.get("decoder_prompt", original_prompt)["prompt_token_ids"]
                beam.weight_versions = lineage.spans(prompt, beam.tokens[len(prompt) :])
        return outputs

    return beam_search


def _bytes(tokens: Iterable[int]) -> bytes:
    return array("q", tokens).tobytes()


def _hash(tokens: Iterable[int]) -> Any:
    return hashlib.blake2b(_bytes(tokens), digest_size=16)
