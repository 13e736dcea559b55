# SPDX-License-Identifier: Apache-2.0
"""The scheduler's pause state while a commit waits, when others pause and resume the engine meanwhile; and which requests are
which."""

import queue
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.executor import UniProcExecutor
from vllm.v1.request import RequestStatus

from vllm_fp8ext.compat import features
from vllm_fp8ext.compat.speed import slot_fast_path
from vllm_fp8ext.compat.update import engine_core
from vllm_fp8ext.compat.update.core_access import CoreAccess
from vllm_fp8ext.config import METHOD, SECTION, Settings
from vllm_fp8ext.update.contract.labels import Label, first_label
from vllm_fp8ext.update.contract.update_errors import NO_CURRENT_WEIGHTS, NO_WEIGHTS, NOT_CURRENT

ALL, NEW, ON = PauseState.PAUSED_ALL, PauseState.PAUSED_NEW, PauseState.UNPAUSED


class Scheduler:
    def __init__(self) -> None:
        self.pause_state = ON
        self.requests: dict[str, SimpleNamespace] = {}
        self.kv_holding_waiting: list[SimpleNamespace] = []
        self.finished: list[str] = []
        self.told: list[str] = []

    def add(self, name: str, status: RequestStatus, outputs: int = 0, *, resumable: bool = False) -> None:
        self.requests[name] = SimpleNamespace(
            request_id=name, status=status, num_output_tokens=outputs, resumable=resumable
        )

    def has_requests(self) -> bool:
        return True

    def reset_encoder_cache(self) -> None:
        self.told.append("scheduler")

    def finish_requests(self, names: list[str], status: RequestStatus) -> list[str]:
        assert status == RequestStatus.FINISHED_ABORTED
        self.finished = names
        return names

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state


class Core(SimpleNamespace):
    ended: list[bool]

    def post_step(self, executed: bool) -> None:
        self.ended.append(executed)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def access(scheduler: Scheduler) -> CoreAccess:
    config = SimpleNamespace(
        additional_config={},
        weight_transfer_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(quantization=None, get_vocab_size=lambda: 100, max_model_len=10),
    )
    executor: Any = object.__new__(UniProcExecutor)
    executor.sleeping_tags = set()
    core = Core(
        vllm_config=config, scheduler=scheduler, model_executor=executor, add_request=None, batch_queue=None
    )
    core._send_abort_outputs = core.set_weight_version = lambda told: None
    return CoreAccess(core)


@pytest.mark.parametrize("pause", [ALL, NEW])
def test_somebody_elses_pause_outlasts_the_wait(
    access: CoreAccess, scheduler: Scheduler, pause: PauseState
) -> None:
    access.admit_no_more()
    assert (scheduler.pause_state, access.interrupted()) == (NEW, False)
    scheduler.set_pause_state(pause)
    assert (scheduler.pause_state, access.interrupted()) == (pause, True)
    access.resume()
    assert (scheduler.pause_state, access.interrupted()) == (pause, False)
    scheduler.set_pause_state(ON)
    assert scheduler.pause_state == ON


def test_who_resumes_meanwhile_does_not_let_requests_in(access: CoreAccess, scheduler: Scheduler) -> None:
    access.admit_no_more()
    scheduler.set_pause_state(ALL)
    scheduler.set_pause_state(ON)
    assert (scheduler.pause_state, access.interrupted()) == (NEW, False)
    access.resume()
    assert scheduler.pause_state == ON
    access.admit_no_more()
    access.stop()
    access.resume()
    assert (scheduler.pause_state, access.paused()) == (ON, False)


@pytest.mark.parametrize("multimodal", [False, True])
def test_what_encoders_made_is_not_found_by_new_weights(
    access: CoreAccess, scheduler: Scheduler, multimodal: bool
) -> None:
    told = scheduler.told
    access._core.model_executor.reset_encoder_cache = lambda: told.append("workers")
    access._core.vllm_config.model_config.is_multimodal_model = multimodal
    access.enter_epoch(Label(1, "late"), recompute=False)
    assert told == (["scheduler", "workers"] if multimodal else [])


def test_which_requests_have_begun_and_which_k_and_v_are_irreplaceable(
    access: CoreAccess, scheduler: Scheduler
) -> None:
    scheduler.add("runs", RequestStatus.RUNNING)
    scheduler.add("preempted", RequestStatus.PREEMPTED, outputs=3)
    scheduler.add("waits", RequestStatus.WAITING)
    assert access.irreplaceable() == 0
    scheduler.add("paused session", RequestStatus.WAITING_FOR_STREAMING_REQ, outputs=3, resumable=True)
    scheduler.add("session with new input", RequestStatus.WAITING, resumable=True)
    scheduler.add("from elsewhere", RequestStatus.WAITING_FOR_REMOTE_KVS)
    holding = ("paused session", "session with new input", "from elsewhere")
    scheduler.kv_holding_waiting = [scheduler.requests[name] for name in holding]
    assert access.irreplaceable() == len(holding)
    access.abort_running()
    assert scheduler.finished == [name for name in scheduler.requests if name != "waits"]


class Steps:
    """A core that queues `depth` steps ahead, of which `failing` fails."""

    def __init__(self, core: Any, depth: int = 2, failing: int = -1) -> None:
        self.core, self.failing, self.begun = core, failing, 0
        self.output_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        core.batch_queue, core.step_with_batch_queue = deque(), self.step
        core.output_queue, core.ended = self.output_queue, []
        self._depth = depth

    def step(self) -> tuple[dict[int, str] | None, bool]:
        queued, runs = self.core.batch_queue, self.core.scheduler.pause_state == ON
        if runs:
            queued.appendleft(self.begun)
            self.begun += 1
            if len(queued) < self._depth:
                return None, True
        step = queued.pop()
        if step == self.failing:
            raise RuntimeError("out of memory")
        return {0: f"tokens of step {step}"}, runs


def test_steps_in_flight_end_and_the_next_is_queued_without_being_waited_for(access: CoreAccess) -> None:
    steps, reports = Steps(access._core), []
    access.begin_step()
    access.begin_step()
    assert (steps.begun, steps.output_queue.qsize()) == (1, 0), "one is queued already"
    access.stop()
    assert steps.output_queue.qsize() == 0, "it goes on"
    access.drain()
    assert (steps.output_queue.get_nowait(), steps.output_queue.qsize()) == ((0, "tokens of step 0"), 0)
    access.resume()
    access.begin_step()
    assert (steps.begun, len(access._core.batch_queue), access._core.ended) == (2, 1, [True, False, True])
    access.time_next_step(lambda _: reports.append(steps.output_queue.get_nowait()))
    access._step()
    access._step()
    assert reports == [(0, "tokens of step 1")], "not what comes after it"


def test_a_step_that_was_only_queued_has_not_ended(access: CoreAccess) -> None:
    steps, reports = Steps(access._core), []
    access.time_next_step(lambda _: reports.append(steps.output_queue.get_nowait()))
    access._step()
    assert reports == []
    access._step()
    assert reports == [(0, "tokens of step 0")]


@pytest.mark.parametrize("stages", [2, 4])
def test_of_pipeline_stages_the_first_step_that_comes_out_has_ended(access: CoreAccess, stages: int) -> None:
    """Each stage has a step in its queue before the first comes out of the last."""
    steps, reports = Steps(access._core, depth=stages), []
    access.time_next_step(lambda _: reports.append(steps.output_queue.get_nowait()))
    for _ in range(stages - 1):
        access._step()
        assert reports == []
    access._step()
    assert reports == [(0, "tokens of step 0")]


def test_a_report_does_not_wait_for_requests_of_another_time(access: CoreAccess) -> None:
    """The only request ended before a step began."""
    Steps(access._core, depth=1)
    reports: list[int] = []
    access.time_next_step(lambda _: reports.append(1))
    vars(access._core.scheduler)["has_requests"] = lambda: False
    access._step()
    del access._core.scheduler.has_requests
    access._step()
    access._step()
    assert reports == []
    assert "post_step" not in vars(access._core)


def test_only_the_last_of_several_reports_is_waited_for(access: CoreAccess, scheduler: Scheduler) -> None:
    Steps(access._core)
    reports: list[int] = []
    for number in range(3):
        access.time_next_step(lambda _, number=number: reports.append(number))
    access._step()
    access._step()
    assert reports == [2]
    assert "post_step" not in vars(access._core)
    vars(scheduler)["has_requests"] = lambda: False
    access.time_next_step(lambda _: reports.append(3))
    assert "post_step" not in vars(access._core), "no step will come"


def test_no_step_is_queued_that_would_be_waited_for_or_of_nothing(access: CoreAccess) -> None:
    steps = Steps(access._core)
    vars(access._core.scheduler)["has_requests"] = lambda: False
    access.begin_step()
    del access._core.scheduler.has_requests
    access._core.model_executor = SimpleNamespace()
    access.begin_step()
    assert steps.begun == 0


def test_where_steps_are_not_queued_ahead_none_is_begun(access: CoreAccess) -> None:
    access.stop()
    access.drain()
    access.resume()
    access.begin_step()


def test_a_step_that_fails_ends_the_engine(access: CoreAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(reason: str) -> None:
        raise SystemExit(reason)

    monkeypatch.setattr(access.watchdog, "end", end)
    Steps(access._core, failing=0)
    access.begin_step()
    access.stop()
    with pytest.raises(SystemExit, match="out of memory"):
        access.drain()


@pytest.mark.parametrize(
    ("quantization", "kernels", "answers"),
    [(METHOD, {}, True), (METHOD, {"slot_fast_path": False}, False), ("fp8", {}, False), (None, {}, False)],
)
def test_a_core_of_blockfp8_answers_its_scheduler_and_names_its_life(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, kernels: dict[str, Any], answers: bool
) -> None:
    def initialize(core: Any) -> None:
        core.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(quantization=quantization),
            weight_transfer_config=None,
            speculative_config=None,
            device_config=SimpleNamespace(device_type="cpu"),
            load_config=SimpleNamespace(load_format="auto"),
            additional_config={SECTION: {"kernels": kernels}},
        )
        core.scheduler = SimpleNamespace(kv_cache_manager="cache")
        core.model_executor = object.__new__(UniProcExecutor)

    attached: list[Any] = []
    monkeypatch.setattr(slot_fast_path, "attach", attached.append)
    cores = [SimpleNamespace() for _ in range(2)]
    for core in cores:
        engine_core._wrap_initialize(initialize)(core)
    assert attached == (["cache", "cache"] if answers else [])
    lives = {vars(core).get("fp8ext_instance") for core in cores}
    assert len(lives) == (2 if quantization == METHOD else 1)
    assert (None in lives) == (quantization != METHOD)


def core_of_ranks(scheduler: Scheduler, ranks: int, labels: list[str]) -> Core:
    """A core, of so many data-parallel ranks, which notes its labels."""
    vars(scheduler)["kv_cache_manager"] = SimpleNamespace(get_computed_blocks=None)
    return Core(
        vllm_config=SimpleNamespace(
            additional_config={},
            weight_transfer_config=None,
            device_config=SimpleNamespace(device_type="cpu"),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
            model_config=SimpleNamespace(quantization=METHOD, get_vocab_size=lambda: 100, max_model_len=10),
        ),
        scheduler=scheduler,
        model_executor=object.__new__(UniProcExecutor),
        add_request=None,
        request_block_hasher=None,
        set_weight_version=labels.append,
        _attach_weight_version=None,
        fp8ext_instance="0a1b",
    )


@pytest.mark.parametrize(("ranks", "labelled"), [(1, True), (2, False)])
def test_tokens_are_labelled_from_the_first_call_on(scheduler: Scheduler, ranks: int, labelled: bool) -> None:
    """vLLM's own label stays where nobody calls; of several data-parallel ranks it wants one."""
    labels: list[str] = []
    assert CoreAccess(core_of_ranks(scheduler, ranks, labels)).instance == "0a1b"
    assert [Label.decode(label) for label in labels] == [first_label("0a1b")] * labelled


def test_without_weight_versions_vllm_has_the_version_alone(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may show it as it is."""
    monkeypatch.setattr(features, "_reasons_told", {features.KEY: {"weight_versions": "the settings"}})
    labels: list[str] = []
    access = CoreAccess(core_of_ranks(scheduler, 1, labels))
    access.relabel(Label(3, "step 3", "0a1b"))
    assert labels == ["epoch-0", "step 3"]


@pytest.mark.parametrize(
    ("settings", "dummy", "reason"),
    [
        ({}, False, None),
        ({}, True, NO_WEIGHTS),
        ({"dummy_weights": "serve"}, True, None),
        ({"ready": "when_current"}, False, NOT_CURRENT),
        ({"ready": "when_current"}, True, NO_CURRENT_WEIGHTS),
        ({"ready": "when_current", "dummy_weights": "serve"}, True, NOT_CURRENT),
    ],
)
def test_what_an_engine_waits_for_at_first(settings: dict[str, Any], dummy: bool, reason: str | None) -> None:
    assert engine_core._awaited(Settings.model_validate(settings), dummy=dummy) == reason
