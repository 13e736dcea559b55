# SPDX-License-Identifier: Apache-2.0
"""Prompts through a small model, against the log-probabilities computed directly."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vllm_fp8ext.update.contract.rank_results import CanaryScore
from vllm_fp8ext.update.worker.score_prompts import (
    SLICE_LAYERS,
    SLICE_TOKENS,
    ObserveLayer,
    observe_kv,
    score_prompts,
)

VOCABULARY, WIDTH = 50, 16
CPU = torch.device("cpu")


class Layer(nn.Module):
    """Mixes each token with the mean of those before it; calls `after` like an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.after: Callable[[], None] = lambda: None

    def forward(self, hidden_TW: Tensor) -> Tensor:
        means = hidden_TW.cumsum(0) / torch.arange(1, len(hidden_TW) + 1)[:, None]
        out = hidden_TW + torch.tanh(self.mix(means))
        self.after()
        return out


class Model(nn.Module):
    """A language model with vLLM's two calls. A rank that gets no logits: `silent`."""

    def __init__(self, layers: int = 3, silent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.silent = silent

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + torch.sin(positions[:, None] / 10.0)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def compute_logits(self, hidden_TW: Tensor) -> Tensor | None:
        return None if self.silent else self.head(hidden_TW)


def attend(model: nn.Module, after: Callable[[], None]) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            module.after = after


def scored(model: Model, prompts: list[list[int]]) -> tuple[CanaryScore, int]:
    """The result, and how often the scoring paused."""
    pauses: list[None] = []
    result = score_prompts(model, prompts, CPU, attend, lambda: pauses.append(None))
    return result, len(pauses)


def direct(model: Model, prompts: list[list[int]]) -> float:
    """Token by token, in float64."""
    total = 0.0
    with torch.no_grad():
        for prompt in prompts:
            logits = model.head(model(torch.tensor(prompt), torch.arange(len(prompt)))).double()
            for position, token in enumerate(prompt[1:]):
                chances = torch.softmax(logits[position], 0)
                total += math.log(float(chances[token]))
    return total


@given(st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=20), min_size=1, max_size=4))
def test_log_probabilities_are_those_of_the_prompts_own_tokens(prompts: list[list[int]]) -> None:
    model = Model()
    result, _ = scored(model, prompts)
    assert result.logprob == pytest.approx(direct(model, prompts), rel=1e-5)
    assert result.tokens == sum(len(prompt) - 1 for prompt in prompts)
    assert result.finite is True


def test_a_prompt_of_one_token_says_nothing() -> None:
    assert scored(Model(), [[3]])[0] == CanaryScore(logprob=0.0, tokens=0, finite=True)


def test_a_rank_without_logits_has_no_tokens() -> None:
    result, _ = scored(Model(silent=True), [[1, 2, 3]])
    assert result == CanaryScore(logprob=0.0, tokens=0, finite=True)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_hidden_state_that_is_not_finite_is_told(value: float, silent: bool) -> None:
    """By every rank; and what is not a number is not sent as one."""
    model = Model(silent=silent)
    with torch.no_grad():
        model.embed.weight[7, 3] = value
    result, _ = scored(model, [[1, 2], [3, 7]])
    assert (result.finite, result.logprob) == (False, 0.0)
    assert scored(model, [[1, 2], [3, 4]])[0].finite


def test_logits_that_are_not_finite_are_told() -> None:
    model = Model()
    with torch.no_grad():
        model.head.bias[9] = math.nan
    assert scored(model, [[1, 2]])[0] == CanaryScore(logprob=0.0, tokens=1, finite=False)


@given(st.lists(st.integers(2, 3000), min_size=1, max_size=3), st.integers(1, 20))
@settings(max_examples=20)
def test_pauses_are_counted_in_layers_and_tokens(lengths: list[int], layers: int) -> None:
    """So they are the same on every rank, however long it takes: a rank that has no logits, or other weights, pauses as
    often. No slice has more layers than are allowed."""
    prompts = [[token % VOCABULARY for token in range(length)] for length in lengths]
    slices: list[int] = []
    model = Model(layers, silent=True)
    done = 0

    def attend_and_count(model: nn.Module, after: Callable[[], None]) -> None:
        def counted() -> None:
            nonlocal done
            done += 1
            after()

        attend(model, counted)

    def pause() -> None:
        nonlocal done
        slices.append(done)
        done = 0

    score_prompts(model, prompts, CPU, attend_and_count, pause)
    assert sum(slices) == layers * len(prompts)
    assert max(slices) <= max(1, min(SLICE_LAYERS, SLICE_TOKENS // min(lengths)))
    assert done == 0, "every prompt ends with a pause"
    other = Model(layers)
    with torch.no_grad():
        other.head.bias.fill_(math.nan)
    assert scored(other, prompts)[1] == len(slices)


@pytest.mark.parametrize(("length", "layers"), [(64, 8), (1024, 8), (2048, 4), (4096, 2), (16384, 1)])
def test_longer_prompts_are_cut_finer(length: int, layers: int) -> None:
    prompt = [token % VOCABULARY for token in range(length)]
    assert scored(Model(16), [prompt])[1] == 16 // layers + 1


class Listened(nn.Module):
    """Notes what it is run on; each of its layers is seen, then done."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.inputs: list[tuple[list[int], list[int]]] = []
        self.told: list[int] | None = None
        self.see: ObserveLayer
        self.after: Callable[[], None]

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.inputs.append((input_ids.tolist(), positions.tolist()))
        for layer in range(self.layers):
            self.see(str(layer), *(input_ids.view(-1, 1, 1),) * 3)
            self.after()
        return input_ids


def listened(prompts: list[list[int]], layers: int = 3) -> tuple[Listened, list[str], list[int]]:
    """The model, the layers that were seen, and how many of them at each pause."""
    model, seen, pauses = Listened(layers), [], []

    def attend(model: Any, after: Any, see: Any = None, lengths: Any = None) -> None:
        model.after, model.see, model.told = after, see, lengths

    def see(layer: str, *_: Tensor) -> None:
        assert torch.is_inference_mode_enabled()
        seen.append(layer)

    observe_kv(model, prompts, CPU, attend, see, lambda: pauses.append(len(seen)))
    return model, seen, pauses


def test_all_prompts_are_heard_in_one_pass_each_from_its_first_position() -> None:
    model, seen, _ = listened([[5, 6, 7], [8], [9, 10]])
    assert model.inputs == [([5, 6, 7, 8, 9, 10], [0, 1, 2, 0, 0, 1])]
    assert model.told == [3, 1, 2]
    assert seen == ["0", "1", "2"]


@pytest.mark.parametrize(("tokens", "layers"), [(64, 8), (2048, 4), (4096, 2), (16384, 1)])
def test_longer_passes_are_cut_finer(tokens: int, layers: int) -> None:
    half = [1] * (tokens // 2)
    assert listened([half, half], 16)[2] == list(range(layers, 17, layers))


def test_a_pooling_model_has_no_logits_and_must_be_finite() -> None:
    class Pooling(Model):
        compute_logits: Any = None

    model = Pooling()
    result = score_prompts(model, [[1, 2, 3]], CPU, attend, lambda: None, has_logits=False)
    assert (result.finite, result.tokens, result.logprob) == (True, 0, 0.0)
    model.layers[1].mix.weight.data[0, 0] = math.nan
    assert not score_prompts(model, [[1, 2, 3]], CPU, attend, lambda: None, has_logits=False).finite
