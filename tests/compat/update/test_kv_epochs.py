# SPDX-License-Identifier: Apache-2.0
"""Which requests begin again at a commit, and what others tell of the weights whose K and V they hold: vLLM's own requests,
and a scheduler that only moves them."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vllm_fp8ext.compat.update import kv_labels
from vllm_fp8ext.compat.update.kv_epochs import RESTARTS, KvEpochs
from vllm_fp8ext.update.contract.labels import Label, Step

LABELS = [Label(epoch, f"step-{epoch}") for epoch in range(6)]


class Scheduler:
    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.kv_holding_waiting: list[Request] = []
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.kv_cache_manager = SimpleNamespace(get_computed_blocks=lambda request, *limit: (request, *limit))

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        assert drop_stale_output
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.waiting.insert(0, request)

    def add(self, name: str, *, resumable: bool = False) -> Request:
        request = Request(
            name, list(range(100)), SamplingParams(max_tokens=8), None, arrival_time=0.0, resumable=resumable
        )
        self.requests[name] = request
        self.run(request)
        return request

    def run(self, request: Request) -> None:
        self.kv_cache_manager.get_computed_blocks(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self.prev_step_scheduled_req_ids.add(request.request_id)


class Core:
    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.label = LABELS[0]

    def _attach_weight_version(self, outputs: dict[int, Any]) -> None:
        for each in outputs.values():
            each.weight_version = self.label.encode()

    def step(self, *requests: Request, sampled: bool = False) -> list[list[Label]]:
        """Compute some tokens of requests, and sample one for each; what they tell of older weights."""
        for request in requests:
            request.num_computed_tokens += 10
            if sampled:
                request.append_output_token_ids(1)
        outputs = [
            SimpleNamespace(request_id=request.request_id, new_token_ids=[1] if sampled else [])
            for request in requests
        ]
        both = {0: SimpleNamespace(outputs=outputs), 1: SimpleNamespace(outputs=[])}
        self._attach_weight_version(both)
        told = Step.decode(both[0].weight_version)
        assert told.label == self.label.encode()
        assert both[1].weight_version == self.label.encode()
        return [[Label.decode(label) for label in told.held.get(r.request_id, ())] for r in requests]

    def commit(self, epochs: KvEpochs, *, restart: bool = True) -> tuple[int, int]:
        result = epochs.restart_prompts() if restart else (0, 0)
        epochs.end(self.label)
        self.label = LABELS[self.label.epoch + 1]
        return result


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def epochs(core: Core) -> KvEpochs:
    """With what tells them to each step."""
    made = KvEpochs(core)
    kv_labels.attach(core, made)
    return made


def test_prompts_begin_again_in_their_order_and_what_has_a_token_goes_on(
    core: Core, epochs: KvEpochs
) -> None:
    scheduler = core.scheduler
    decodes, first, session, second = (
        scheduler.add(name, resumable=name == "session") for name in ("decodes", "first", "session", "second")
    )
    core.step(decodes, sampled=True)
    core.step(first, session, second, second)
    assert core.commit(epochs) == (2, 30)
    assert scheduler.running == [decodes, session]
    assert scheduler.waiting == [first, second]
    assert scheduler.prev_step_scheduled_req_ids == {"decodes", "session"}
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_computed_tokens == 100
    for request in (first, second):
        scheduler.run(request)
    assert core.step(decodes, session, first, second, sampled=True) == [[], [LABELS[0]], [], []]
    assert core.step(decodes, session, first, second, sampled=True) == [[], [], [], []]


def test_a_prompt_begins_again_twice_and_then_tells_of_all_whose_k_and_v_it_holds(
    core: Core, epochs: KvEpochs
) -> None:
    request = core.scheduler.add("long")
    for turn in range(RESTARTS):
        core.step(request)
        assert core.commit(epochs) == (1, 10)
        assert core.scheduler.running == []
        assert core.commit(epochs) == (0, 0), f"it waits, turn {turn}"
        core.scheduler.run(request)
    assert core.label == LABELS[4]
    core.step(request)
    assert core.commit(epochs) == (0, 0)
    assert core.scheduler.running == [request]
    core.label = LABELS[5]
    assert core.step(request) == [[]], "no token yet"
    assert core.step(request, sampled=True) == [[LABELS[4]]]


def test_weights_that_computed_nothing_of_a_request_are_not_told(core: Core, epochs: KvEpochs) -> None:
    request = core.scheduler.add("session", resumable=True)
    core.step(request)
    core.commit(epochs)
    core.commit(epochs)
    core.step(request)
    core.commit(epochs)
    assert core.step(request, sampled=True) == [[LABELS[0], LABELS[2]]]


def test_k_and_v_that_are_lost_are_not_told_of(core: Core, epochs: KvEpochs) -> None:
    """A request that was preempted for lack of memory begins anew; one that is over is forgotten."""
    scheduler = core.scheduler
    lost, over = scheduler.add("lost", resumable=True), scheduler.add("over", resumable=True)
    core.step(lost, over)
    core.commit(epochs)
    scheduler.running.clear()
    lost.num_computed_tokens = 0
    del scheduler.requests["over"]
    scheduler.run(lost)
    core.step(lost)
    assert core.step(lost, sampled=True) == [[]]
    core.commit(epochs)
    assert epochs._to_tell == {}


def test_what_is_computed_again_after_a_token_tells_of_weights_that_sampled_none(
    core: Core, epochs: KvEpochs
) -> None:
    """Preempted after its first token, met by another commit while K and V were computed again in steps."""
    request = core.scheduler.add("preempted")
    core.step(request, sampled=True)
    core.commit(epochs)
    core.scheduler.running.clear()
    request.num_computed_tokens = 0
    core.scheduler.run(request)
    core.step(request)
    assert core.commit(epochs) == (0, 0), "some of it was sent"
    assert core.step(request, sampled=True) == [[LABELS[1]]]


def test_a_request_that_holds_k_and_v_while_it_waits_tells_of_them(core: Core, epochs: KvEpochs) -> None:
    request = core.scheduler.add("waits", resumable=True)
    core.step(request)
    core.scheduler.running.clear()
    core.scheduler.kv_holding_waiting.append(request)
    core.commit(epochs)
    assert core.step(request, sampled=True) == [[LABELS[0]]]


def test_vllm_0_33_passes_a_limit(core: Core, epochs: KvEpochs) -> None:
    request = core.scheduler.add("any")
    assert core.scheduler.kv_cache_manager.get_computed_blocks(request, 32) == (request, 32)


def test_a_vllm_without_versions_of_steps_still_begins_prompts_again(core: Core) -> None:
    """Then nobody asks for labels, and those of requests that end are forgotten."""
    epochs = KvEpochs(core)
    early, late = core.scheduler.add("early"), core.scheduler.add("late")
    core.step(early, sampled=True)
    late.num_computed_tokens = 10
    assert core.commit(epochs) == (1, 10)
    assert core.step(early, sampled=True) == [[]]
    assert late.status == RequestStatus.PREEMPTED
