# SPDX-License-Identifier: Apache-2.0
"""An engine in a steady state: so many requests in flight, spread evenly over their responses."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

SETTLE_SECONDS = 5.0
"""Without another request's first token: those that still wait find no room for their K and V."""


@dataclass(frozen=True, kw_only=True)
class SteadyLoad:
    """`requests` at once, each with `tokens` of input and `output` of response; then `windows` of `seconds` each."""

    requests: int
    tokens: int
    output: int
    windows: int
    seconds: float


@dataclass(frozen=True)
class Window:
    """Counts of an engine: response tokens, preemptions, and mean requests with tokens in a step."""

    seconds: float
    tokens: int
    preemptions: int
    running: float

    @property
    def rate(self) -> float:
        """Response tokens per second."""
        return self.tokens / self.seconds


class Steady:
    """Drives `vllm.LLM`'s engine step by step. A request that is done is followed by a new one.

    The first requests begin in the midst of their responses: what they would have sampled so far is input.
    """

    def __init__(self, engine: Any, load: SteadyLoad, seed: int = 0) -> None:
        self._core = engine.llm_engine
        self._metrics: Callable[[], list[Any]] = engine.get_metrics
        self._vocabulary = engine.model_config.get_vocab_size()
        self._load = load
        self._draw = random.Random(seed)
        self._names: set[str] = set()
        self._fresh: set[str] = set()
        """Return the first requests that have no token yet."""
        self._count = 0

    def windows(self) -> list[Window]:
        """Measure, and leave nothing behind."""
        load = self._load
        places = [load.output * (2 * n + 1) // (2 * load.requests) for n in range(load.requests)]
        self._draw.shuffle(places)
        for place in places:
            self._fresh.add(self._begin(load.tokens + place, load.output - place))
        settle_until = time.perf_counter() + SETTLE_SECONDS
        while self._fresh and time.perf_counter() < settle_until:
            before = len(self._fresh)
            self._step()
            if len(self._fresh) < before:
                settle_until = time.perf_counter() + SETTLE_SECONDS
        windows = [self._window() for _ in range(load.windows)]
        self._core.abort_request(list(self._names))
        while self._core.has_unfinished_requests():
            self._core.step()
        return windows

    def _begin(self, tokens: int, output: int) -> str:
        name = f"{id(self)}-{self._count}"
        self._count += 1
        prompt = {"prompt_token_ids": self._draw.choices(range(self._vocabulary), k=tokens)}
        sampling = SamplingParams(
            temperature=0,
            max_tokens=output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._core.add_request(name, prompt, sampling)
        self._names.add(name)
        return name

    def _step(self) -> tuple[int, int]:
        """Response tokens, and requests that got any."""
        tokens = requests = 0
        for answer in self._core.step():
            new = len(answer.outputs[0].token_ids)
            tokens += new
            requests += new > 0
            self._fresh.discard(answer.request_id)
            if answer.finished:
                self._names.remove(answer.request_id)
                self._begin(self._load.tokens, self._load.output)
        return tokens, requests

    def _window(self) -> Window:
        tokens = requests = steps = 0
        preempted, start = self._preemptions(), time.perf_counter()
        while (seconds := time.perf_counter() - start) < self._load.seconds:
            new, running = self._step()
            tokens, requests, steps = tokens + new, requests + running, steps + (new > 0)
        return Window(seconds, tokens, self._preemptions() - preempted, requests / max(1, steps))

    def _preemptions(self) -> int:
        return sum(metric.value for metric in self._metrics() if metric.name == "vllm:num_preemptions")


def kv_tokens(engine: Any) -> int:
    """Tokens of K and V that an engine's cache holds."""
    cache = engine.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)
