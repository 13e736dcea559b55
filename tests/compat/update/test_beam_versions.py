# SPDX-License-Identifier: Apache-2.0
"""Which weights sampled the tokens of beams: vLLM's own searches, over requests whose answers are made up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import CompletionOutput, RequestOutput
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.logprobs import Logprob
from vllm.outputs import WeightVersionSpan
from vllm.sampling_params import BeamSearchParams

from vllm_fp8ext.compat.update.beam_versions import Lineage, _wrap_offline, _wrap_online, label_of
from vllm_fp8ext.compat.update.weight_versions import EpochSpan
from vllm_fp8ext.update.contract.labels import Label, first_label

EOS = 99
PROMPT = [5, 6, 7]
FIRST = first_label("0a1b")
SECOND = FIRST.next("late")
ABORTED = FIRST.next("late", aborts=True)
Answer = Callable[[list[int]], list[Label] | None]
"""Labels that a request with these tokens gets: of weights that computed K and V, the last that of its token. Without any it
is ended; None: it fails."""


def epochs(spans: list[Any] | None) -> list[tuple[int, int, int]]:
    assert spans is not None
    return [(span.epoch, span.start, span.end) for span in spans]


def answered(tokens: list[int], sampled_by: list[Label] | None) -> RequestOutput:
    """One step: likeliest first, and after five tokens the end."""
    place = len(tokens) - len(PROMPT)
    likely = [10 + place, 20 + place, 30 + place, EOS if place == 4 else 40 + place]
    scores = {token: Logprob(-0.5 - index) for index, token in enumerate(likely)}
    if place == 4:
        scores[EOS] = Logprob(-0.1)
    labels = sampled_by or []
    ended = not labels
    spans = [WeightVersionSpan(label.encode(), 0, int(label is labels[-1])) for label in labels]
    output = CompletionOutput(
        index=0,
        text="",
        token_ids=[] if ended else [likely[0]],
        cumulative_logprob=None,
        logprobs=None if ended else [scores],
        finish_reason="error" if sampled_by is None else "abort" if ended else "length",
        weight_versions=[EpochSpan.of(span) for span in spans],
    )
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=tokens,
        prompt_logprobs=None,
        outputs=[output],
        finished=True,
    )


class Serving(BeamSearchOnlineMixin):
    """What vLLM's online search needs of a server."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[list[int]] = []
        tokenizer = SimpleNamespace(eos_token_id=EOS, decode=lambda tokens, **_: str(tokens))
        self.renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)  # type: ignore[assignment]
        config = SimpleNamespace(model_config=SimpleNamespace(max_logprobs=20, get_vocab_size=lambda: 100))
        processor = SimpleNamespace(
            resolve_watermarking=lambda params: None, generation_config_fields={}, vllm_config=config
        )

        async def generate(prompt: Any, *_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
            tokens = list(prompt["prompt_token_ids"])
            self.asked.append(tokens)
            yield answered(tokens, answer(tokens))

        self.engine_client = SimpleNamespace(generate=generate, input_processor=processor)  # type: ignore[assignment]


def searched(answer: Answer, tokens: int = 4, **more: Any) -> list[CompletionOutput]:
    async def run() -> list[CompletionOutput]:
        params = BeamSearchParams(beam_width=2, max_tokens=tokens, **more)
        search = _wrap_online(BeamSearchOnlineMixin.beam_search)
        prompt = {"type": "token", "prompt_token_ids": PROMPT}
        return [result async for result in search(Serving(answer), prompt, "search", params)][-1].outputs

    return asyncio.run(run())


def since(place: int, label: Label) -> Answer:
    """The first weights for the first tokens, and then others."""
    return lambda tokens: [label if len(tokens) - len(PROMPT) >= place else FIRST]


def test_beams_without_a_commit_have_one_span() -> None:
    for beam in searched(lambda tokens: [FIRST]):
        assert beam.weight_versions == [EpochSpan("epoch-0", 0, 4, 0, "0a1b")]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_beams_that_meet_a_commit_have_a_span_for_each_weights(place: int) -> None:
    beams = searched(since(place, SECOND))
    assert len(beams) == 2
    for beam in beams:
        assert epochs(beam.weight_versions) == [(0, 0, place), (1, place, 4)]
        assert beam.finish_reason == "length"


def test_each_beam_has_the_spans_of_its_own_steps() -> None:
    """A commit that comes between the requests of one step."""

    def answer(tokens: list[int]) -> list[Label]:
        return [SECOND if len(tokens) > len(PROMPT) + 2 or tokens[-1] == 21 else FIRST]

    beams = {beam.token_ids[-3]: beam for beam in searched(answer)}
    for token, beam in beams.items():
        place = 2 if token == 21 else 3
        assert epochs(beam.weight_versions) == [(0, 0, place), (1, place, 4)]


@pytest.mark.parametrize("eos", [False, True])
def test_who_ended_a_beam_is_told(eos: bool) -> None:
    """Its end was sampled by other weights than its tokens, whether or not it is one of them."""
    best, *_ = searched(since(4, SECOND), 6, include_stop_str_in_output=eos)
    assert (best.finish_reason, len(best.token_ids)) == ("stop", 4 + eos)
    assert epochs(best.weight_versions) == [(0, 0, 4), (1, 4, 4 + eos)]


def test_weights_whose_k_and_v_a_step_held_are_told() -> None:
    third = SECOND.next("third")
    beams = searched(lambda tokens: [FIRST, SECOND, third] if len(tokens) == len(PROMPT) + 2 else [third])
    assert epochs(beams[0].weight_versions) == [(2, 0, 2), (0, 2, 2), (1, 2, 2), (2, 2, 4)]


@pytest.mark.parametrize("place", [1, 3])
def test_beams_end_at_a_commit_with_abort_that_met_none_of_their_requests(place: int) -> None:
    for beam in searched(since(place, ABORTED)):
        assert (beam.finish_reason, len(beam.token_ids)) == ("abort", place)
        assert epochs(beam.weight_versions) == [(0, 0, place)]


def test_beams_end_when_one_of_their_requests_was_ended() -> None:
    for beam in searched(lambda tokens: [] if len(tokens) == len(PROMPT) + 2 else [FIRST]):
        assert (beam.finish_reason, len(beam.token_ids)) == ("abort", 2)
        assert epochs(beam.weight_versions) == [(0, 0, 2)]


def test_a_search_that_ends_before_its_first_token_has_no_span() -> None:
    [beam] = searched(lambda tokens: [])
    assert (beam.finish_reason, list(beam.token_ids), beam.weight_versions) == ("abort", [], [])


@pytest.mark.parametrize("place", [0, 2])
def test_a_search_that_fails_says_so(place: int) -> None:
    def answer(tokens: list[int]) -> list[Label] | None:
        return None if len(tokens) == len(PROMPT) + place else [FIRST]

    [beam] = searched(answer)
    assert (beam.finish_reason, list(beam.token_ids)) == ("error", [])


def test_an_abort_before_the_search_ends_nothing() -> None:
    for beam in searched(since(2, ABORTED.next("more"))):
        assert beam.finish_reason == "abort"
    for beam in searched(lambda tokens: [ABORTED.next("more")]):
        assert beam.finish_reason == "length"


def test_searches_of_an_llm_are_labelled_each_by_itself() -> None:
    """Two prompts, of which the second begins after a commit with `abort`: the first search ends there."""

    class Llm(BeamSearchOfflineMixin):
        def __init__(self) -> None:
            fields = SimpleNamespace(
                model_config=SimpleNamespace(max_logprobs=20, get_vocab_size=lambda: 100)
            )
            processor = SimpleNamespace(
                resolve_watermarking=lambda params: None, generation_config_fields={}, vllm_config=fields
            )
            tokenizer = SimpleNamespace(eos_token_id=EOS, decode=lambda tokens, **_: str(tokens))
            self.llm_engine: Any = SimpleNamespace(input_processor=processor)
            self.renderer: Any = SimpleNamespace(get_tokenizer=lambda: tokenizer)

        def _preprocess_cmpl(self, prompts: Any) -> Any:  # type: ignore[override]
            return prompts

        def _lora_request_to_seq(self, *_: Any) -> Any:  # type: ignore[override]
            return [None, None]

        def _priority_to_seq(self, *_: Any) -> Any:  # type: ignore[override]
            return [0, 0]

        def _params_to_seq(self, params: Any, count: int) -> Any:  # type: ignore[override]
            return [params] * count

        def _render_and_run_requests(self, prompts: Any, **_: Any) -> Any:  # type: ignore[override]
            asked = [list(prompt["prompt_token_ids"]) for prompt in prompts]
            return [
                answered(tokens, since(2, ABORTED)(tokens) if tokens[0] == 5 else [ABORTED])
                for tokens in asked
            ]

    llm = Llm()
    prompts: Any = [{"type": "token", "prompt_token_ids": [first, 6, 7]} for first in (5, 8)]
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    ended, whole = _wrap_offline(BeamSearchOfflineMixin.beam_search)(
        llm, prompts, params, concurrency_limit=1
    )
    assert "_render_and_run_requests" not in vars(llm)
    for beam in ended.sequences:
        assert (beam.finish_reason, epochs(beam.weight_versions)) == ("abort", [(0, 0, 2)])
    for beam in whole.sequences:
        assert (beam.finish_reason, epochs(beam.weight_versions)) == (None, [(1, 0, 4)])


def test_a_token_of_which_nothing_is_known_makes_no_spans() -> None:
    lineage = Lineage()
    lineage.take(answered(PROMPT, [FIRST]))
    assert lineage.spans(PROMPT, [1, 2]) is None
    assert epochs(lineage.spans(PROMPT, [1])) == [(0, 0, 1)]


def test_vllms_own_spans_are_read_too() -> None:
    """Those of an engine in the trainer's own process."""
    span = WeightVersionSpan(SECOND.encode(), 0, 1)
    assert label_of(span) == SECOND
    assert label_of(EpochSpan.of(span)) == SECOND
