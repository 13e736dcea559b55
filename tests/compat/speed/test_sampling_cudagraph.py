# SPDX-License-Identifier: Apache-2.0
"""Which steps are sampled by a CUDA graph, and what it is given. That it samples what vLLM does, `tests/gpu` shows."""

import contextlib
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_fp8ext.compat.speed import decode_step_reuse, samplers, sampling_cudagraph

PLACES, VOCABULARY = 6, 50


class Graph:
    """Counts its replays, which come after what is on its way to the host."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.replays = 0

    def replay(self) -> None:
        assert self.runner.waited == 1
        self.runner.waited = 0
        self.replays += 1


class Runner:
    """With the sampler's settings of six requests, and graphs of two and of four rows; vLLM's own function answers "vllm"."""

    def __init__(self) -> None:
        self.waited = 0
        self.output_copy_stream = object()
        self.main_stream = SimpleNamespace(wait_stream=self._wait)
        self.req_states = SimpleNamespace(
            prefill_len=SimpleNamespace(gpu=torch.arange(PLACES, dtype=torch.int32))
        )
        self.counts = np.full(PLACES, -1)
        self.sampler = SimpleNamespace(
            needs_logits_processing=np.zeros(PLACES, dtype=bool),
            sampling_states=SimpleNamespace(
                vocab_size=VOCABULARY,
                top_k=SimpleNamespace(np=np.full(PLACES, VOCABULARY)),
                top_p=SimpleNamespace(np=np.ones(PLACES)),
                min_p=SimpleNamespace(np=np.full(PLACES, 0.1)),
                temperature=SimpleNamespace(gpu=torch.rand(PLACES), np=np.ones(PLACES)),
                seeds=SimpleNamespace(gpu=torch.arange(PLACES) + 100),
            ),
            logits_processors=["bias", "penalties", "words"],
            thinking_budget_state="budget",
            get_logprobs_dims=self._dims,
            logprob_token_ids_state=SimpleNamespace(num_token_ids=SimpleNamespace(np=np.full(PLACES, 2))),
        )
        self.tokens_of_others = 0
        self.samplers = samplers.Samplers(PLACES, torch.device("cpu"))
        for rows in (2, 4):
            for logprobs, scaled in itertools.product(sampling_cudagraph.LOGPROBS, (False, True)):
                graph: Any = Graph(self)
                self.samplers.graphs[rows, logprobs, scaled] = samplers.SamplingGraph(
                    graph, output(rows, logprobs), None
                )
        self.cudagraph_manager = SimpleNamespace(**{sampling_cudagraph._SAMPLERS: self.samplers})
        self.kept = decode_step_reuse.PreviousStep()
        setattr(self, decode_step_reuse._PREVIOUS, self.kept)

    def _wait(self, stream: object) -> None:
        assert stream is self.output_copy_stream
        self.waited += 1

    def _dims(self, places: Any) -> tuple[int, int] | None:
        most = int(self.counts[places].max())
        return None if most < 0 and not self.tokens_of_others else (max(most, 0), self.tokens_of_others)

    def sample(self, batch: Any, grammar: Any = None) -> Any:
        self.kept.batch = batch
        return sampling_cudagraph._wrap_sample(lambda *_: "vllm")(self, None, batch, grammar)

    def replays(self) -> dict[tuple[int, int | None, bool], int]:
        result: Any = {key: captured.graph for key, captured in self.samplers.graphs.items()}
        return {key: graph.replays for key, graph in result.items() if graph.replays}


def output(rows: int, logprobs: int | None) -> SamplerOutput:
    tokens = torch.arange(rows)[:, None]
    told = None
    if logprobs is not None:
        columns = tokens.repeat(1, 1 + logprobs)
        told = LogprobsTensors(columns, columns * -0.5, torch.arange(rows) + 7)
    return SamplerOutput(tokens, told, None, torch.ones(rows), torch.zeros(rows))


def batch(*places: int, rows: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        idx_mapping=torch.tensor(places),
        idx_mapping_np=np.array(places),
        num_reqs=len(places),
        num_tokens_after_padding=rows,
    )


@pytest.mark.parametrize("logprobs", sampling_cudagraph.LOGPROBS)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_graph_samples_as_many_rows_as_there_are_requests(logprobs: int | None, scaled: bool) -> None:
    runner = Runner()
    runner.counts[5] = -1 if logprobs is None else logprobs
    if scaled:  # one of them has a temperature
        runner.sampler.needs_logits_processing[1] = True
        samplers.scaled_places(runner.sampler.sampling_states)[1] = True
    step = batch(3, 5, 1)
    sampled, counts, rejected = runner.sample(step)
    assert runner.replays() == {(4, logprobs, scaled): 1}
    assert sampled.sampled_token_ids.tolist() == [[0], [1], [2]]
    assert counts.tolist() == [1, 1, 1]
    assert rejected.tolist() == [0, 0, 0]
    if logprobs is None:
        assert sampled.logprobs_tensors is None
    else:
        assert sampled.logprobs_tensors.logprob_token_ids.shape == (3, 1 + logprobs)
        assert sampled.logprobs_tensors.logprobs.shape == (3, 1 + logprobs)
        assert sampled.logprobs_tensors.selected_token_ranks.tolist() == [7, 8, 9]
    assert runner.samplers.places_R[:3].tolist() == [3, 5, 1]
    assert torch.equal(runner.samplers.temperature_S, runner.sampler.sampling_states.temperature.gpu)
    assert runner.samplers.seeds_S.tolist() == [100, 101, 102, 103, 104, 105]
    assert runner.samplers.prompts_S.tolist() == [0, 1, 2, 3, 4, 5]


def test_settings_are_looked_at_when_other_requests_come() -> None:
    runner = Runner()
    first = batch(0, 1, rows=2)
    first_places = first.idx_mapping
    for _ in range(3):
        step = batch(0, 1, rows=2)
        step.idx_mapping = first_places
        assert runner.sample(step) != "vllm"
        runner.sampler.needs_logits_processing[:] = True  # which only requests that come change
    assert runner.replays() == {(2, None, False): 3}
    assert runner.sample(batch(0, 1, rows=2)) == "vllm"
    runner.sampler.needs_logits_processing[:] = False
    runner.sampler.sampling_states.seeds.gpu = torch.arange(PLACES) + 200
    assert runner.sample(batch(0, 1, rows=2)) != "vllm"
    assert runner.samplers.seeds_S[0] == 200


@pytest.mark.parametrize(
    "what", ["processed", "top_k", "top_p", "logprobs", "tokens", "rows", "grammar", "step"]
)
def test_other_steps_are_sampled_by_vllm(what: str) -> None:
    runner = Runner()
    states = runner.sampler.sampling_states
    step, grammar = batch(2, 4, rows=3 if what == "rows" else 2), object() if what == "grammar" else None
    if what == "processed":
        runner.sampler.needs_logits_processing[4] = True
    elif what == "top_k":
        states.top_k.np[4] = 3
    elif what == "top_p":
        states.top_p.np[2] = 0.9
    elif what == "logprobs":
        runner.counts[2] = 5
    elif what == "tokens":
        runner.tokens_of_others = 1
    if what == "step":
        runner.kept.batch = batch(2, 4, rows=2)
        assert sampling_cudagraph._wrap_sample(lambda *_: "vllm")(runner, None, step, None) == "vllm"
    else:
        assert runner.sample(step, grammar) == "vllm"
    assert runner.replays() == {}


def test_the_settings_of_others_do_not_matter() -> None:
    runner = Runner()
    runner.sampler.needs_logits_processing[0] = True
    runner.sampler.sampling_states.top_k.np[0] = 3
    assert runner.sample(batch(2, 4, rows=2)) != "vllm"


class Processor:
    """Changes logits of requests with a penalty."""

    def add_request(self, place: int, params: SamplingParams) -> bool:
        return params.presence_penalty != 0


@pytest.mark.parametrize(
    ("params", "needed", "sampled"),
    [
        ({"temperature": 1.0}, False, True),
        ({"temperature": 0.0}, False, True),
        ({"temperature": 0.7}, True, True),
        ({"temperature": 0.7, "top_k": 5}, True, False),
        ({"temperature": 0.7, "top_p": 0.9}, True, False),
        ({"temperature": 0.7, "min_p": 0.1}, True, False),
        ({"temperature": 1.0, "min_p": 0.1}, True, False),
        ({"temperature": 0.7, "presence_penalty": 0.5}, True, False),
        ({"temperature": 1.0, "presence_penalty": 0.5}, True, False),
        ({"temperature": 0.0, "presence_penalty": 0.5}, True, False),
    ],
)
def test_a_temperature_alone_is_in_the_graph(params: dict[str, Any], needed: bool, sampled: bool) -> None:
    """Whatever request had the place before; what vLLM is told is as it was."""
    held = {name: SimpleNamespace(np=np.zeros(PLACES)) for name in ("temperature", "top_p", "min_p", "seeds")}
    states = SimpleNamespace(
        **held,
        vocab_size=VOCABULARY,
        top_k=SimpleNamespace(np=np.full(PLACES, VOCABULARY)),
        num_logprobs=np.zeros(PLACES),
        seeds_set=np.zeros(PLACES, dtype=bool),
    )
    ask = sampling_cudagraph._wrap_state_add_request(SamplingStates.add_request)
    states.add_request = functools.partial(ask, states)
    sampler: Any = SimpleNamespace(
        needs_logits_processing=np.zeros(PLACES, dtype=bool),
        sampling_states=states,
        thinking_budget_state=SimpleNamespace(add_request=lambda place, params: False),
        logits_processors=[Processor()],
        logprob_token_ids_state=SimpleNamespace(add_request=lambda place, params: None),
        trace_replay_state=None,
    )
    add = sampling_cudagraph._wrap_add_request(Sampler.add_request)
    for before in ({"temperature": 0.5}, {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.5}):
        for given in (before, params):
            add(sampler, 2, SamplingParams(seed=1, **given))
        assert sampler.needs_logits_processing[2] == needed
        assert samplers.only_scales(sampler, np.array([2])) is sampled


def test_what_is_captured_reads_what_stays_where_it_is() -> None:
    """And the settings of the first place are as they were when it is done, whatever happens."""
    runner = Runner()
    states = runner.sampler.sampling_states
    states.num_logprobs = np.full(PLACES, 9)
    states.top_k.np[:], states.top_p.np[:] = 3, 0.5
    given = [holder.gpu for holder in (states.temperature, states.seeds, runner.req_states.prefill_len)]
    for logprobs, scaled in itertools.product(sampling_cudagraph.LOGPROBS, (False, True)):
        with (
            contextlib.suppress(RuntimeError),
            sampling_cudagraph._settings(runner, runner.samplers, logprobs, scaled=scaled),
        ):
            assert runner.sampler.needs_logits_processing[0] == scaled
            assert states.temperature.np[0] not in (0, 1)
            assert states.min_p.np[0] == 0
            assert states.top_k.np[0] == VOCABULARY
            assert states.top_p.np[0] == 1
            assert runner.sampler.logits_processors == []
            runner.sampler.thinking_budget_state.apply(None, None)
            assert states.num_logprobs[0] == (-1 if logprobs is None else logprobs)
            assert runner.sampler.logprob_token_ids_state.num_token_ids.np[0] == 0
            assert states.temperature.gpu is runner.samplers.temperature_S
            assert states.seeds.gpu is runner.samplers.seeds_S
            assert runner.req_states.prefill_len.gpu is runner.samplers.prompts_S
            raise RuntimeError
    assert not runner.sampler.needs_logits_processing.any()
    assert states.temperature.np.tolist() == [1] * PLACES
    assert states.min_p.np.tolist() == [0.1] * PLACES
    assert runner.sampler.logits_processors == ["bias", "penalties", "words"]
    assert runner.sampler.thinking_budget_state == "budget"
    assert runner.sampler.logprob_token_ids_state.num_token_ids.np.tolist() == [2] * PLACES
    assert states.num_logprobs.tolist() == [9] * PLACES
    assert states.top_k.np.tolist() == [3] * PLACES
    assert states.top_p.np.tolist() == [0.5] * PLACES
    after = [holder.gpu for holder in (states.temperature, states.seeds, runner.req_states.prefill_len)]
    assert all(one is other for one, other in zip(given, after, strict=True))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no more"), AssertionError("no more")])
def test_what_can_not_be_captured_is_left_to_vllm(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def captured(runner: Any) -> Any:
        raise error

    monkeypatch.setattr(sampling_cudagraph, "_capture_samplers", captured)
    monkeypatch.setattr(sampling_cudagraph, "_can_sample", lambda runner: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 5))
    runner: Any = SimpleNamespace(cudagraph_manager=SimpleNamespace())
    assert sampling_cudagraph._wrap_capture_model(lambda self, *, profile_only: 7)(runner) == 7
    assert vars(runner.cudagraph_manager) == {}
    assert "without CUDA graphs: no more" in caplog.text


def test_graphs_that_only_measure_memory_have_none_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the memory is told that they will take."""
    model = SimpleNamespace(head_dtype=torch.bfloat16)
    runner: Any = SimpleNamespace(vllm_config=None, max_num_reqs=9, vocab_size=1000, model_config=model)
    capture = sampling_cudagraph._wrap_capture_model(lambda self, *, profile_only: 7)
    for asked, more in ((False, 0), (True, 54_000 + sampling_cudagraph.OTHER_BYTES)):
        monkeypatch.setattr(decode_step_reuse, "is_configured", lambda config, asked=asked: asked)
        assert capture(runner, profile_only=True) == 7 + more
    model.head_dtype = torch.float32
    assert capture(runner, profile_only=True) == 7 + 72_000 + sampling_cudagraph.OTHER_BYTES
    model.head_dtype, runner.max_num_reqs = torch.bfloat16, 1024
    assert capture(runner, profile_only=True) == 7 + 1_536_000 + sampling_cudagraph.OTHER_BYTES
    setattr(runner, decode_step_reuse._PREVIOUS, None)
    runner.sampler, runner.cudagraph_manager = None, SimpleNamespace()
    assert capture(runner) == 7
    assert vars(runner.cudagraph_manager) == {}
