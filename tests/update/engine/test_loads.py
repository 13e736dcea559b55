# SPDX-License-Identifier: Apache-2.0
"""Updates that calls of `load_weights` in the ranks make."""

from typing import Any

import pytest

from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.update.contract.kv_names import layer_scale
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.rank_results import (
    Accepted,
    CanaryScore,
    Fingerprint,
    Loaded,
    LoadEvent,
    LoadKind,
    RankResult,
    StagedTensors,
    SwapTime,
)
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.engine.engine import UpdateEngine

from .test_native import Clock, TransferCore

SHAPE = (4, 2)
NAMES = ("a", "b", "c")
END = LoadEvent(kind=LoadKind.END, call="finalize_layerwise_reload")


def tensors(*names: str, **more: Any) -> LoadEvent:
    return LoadEvent(kind=LoadKind.TENSORS, tensors=[(name, SHAPE, "bfloat16") for name in names], **more)


class LoadingCore(TransferCore):
    """A core of two ranks, which tell what `events` says they were called with."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.events: list[list[LoadEvent]] = [[], []]
        self.permits: list[tuple[Any, ...]] = []
        self.calls: list[str] = []

    def ranks(self, method: str, *arguments: Any) -> list[RankResult]:
        self.calls.append(method)
        if method == "loads.permit":
            self.permits.append(arguments)
        if method == "loads.take":
            events, self.events = self.events, [[], []]
            return [Loaded(events=each) for each in events]
        if method == "wait_for_swap":
            return [SwapTime(seconds=0.0)] * 2
        if method == "poll":
            last = next(call for call in reversed(self.calls) if call != "poll")
            return [CanaryScore() if last == "run_canary" else Fingerprint(fingerprint=1)] * 2
        return [Accepted()] * 2

    def stop(self) -> None: ...
    def drain(self) -> None: ...
    def resume(self) -> None: ...
    def begin_step(self) -> None: ...
    def restart_prompts(self) -> tuple[int, int]:
        return 0, 0

    def enter_epoch(self, label: Any, *, recompute: bool) -> None: ...
    def pause_state(self) -> None: ...
    def pause_again(self, state: Any) -> None: ...


def engine_of(core: LoadingCore) -> UpdateEngine:
    engine = UpdateEngine(core, Clock())  # type: ignore[arg-type]  # the rest is not asked for
    pieces = {
        name: (
            ShardSlice(
                0, "abc"[: 2 if name < "c" else 3], SHAPE, ((0, 4), (0, 2)), (0, 0), False, "bfloat16"
            ),
        )
        for name in NAMES
    }
    specs = {name: TensorSpec(name, SHAPE, "bfloat16") for name in NAMES}
    engine._model._manifest = Manifest(specs, frozenset(), pieces, "fp32", 2)
    return engine


def call(engine: UpdateEngine, *events: LoadEvent, other: list[LoadEvent] | None = None) -> None:
    """The ranks are called: the second one with `other`, if that is anything else."""
    core: Any = engine.core
    engine.loads.before()
    core.events = [list(events), list(events) if other is None else other]
    engine.loads.after()


def refused(engine: UpdateEngine, *events: LoadEvent, **more: Any) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        call(engine, *events, **more)
    return caught.value


def test_an_update_is_served_when_its_end_is_marked() -> None:
    engine = engine_of(LoadingCore())
    call(engine, tensors("a"), tensors("b"))
    call(engine, tensors("c"))
    assert (engine.status().state, engine.committer.live.epoch) == ("updating", 0)
    call(engine, END)
    assert (engine.status().state, engine.committer.live.epoch) == ("serving", 1)
    call(engine, tensors("c"), END)
    assert engine.committer.live.epoch == 2


def test_a_matrix_of_which_a_part_came_is_not_served() -> None:
    engine = engine_of(LoadingCore())
    assert refused(engine, tensors("a"), END).kind == "incomplete"
    assert (engine.status().state, engine.committer.live.epoch) == ("serving", 0)
    assert "incomplete" in str(refused(engine, END))


def test_by_completeness_an_update_is_served_with_its_last_tensor() -> None:
    engine = engine_of(LoadingCore(load_weights_end="complete"))
    for name in NAMES:
        assert engine.committer.live.epoch == 0
        call(engine, tensors(name))
    assert engine.committer.live.epoch == 1
    call(engine, END)
    assert refused(engine, tensors("c"), END).kind == "incomplete"


def test_what_is_wrong_on_any_rank_ends_the_update_on_all() -> None:
    core = LoadingCore()
    engine = engine_of(core)
    call(engine, tensors("a"))
    problem = {"kind": "non-finite", "tensor": "b", "rank": 1}
    bad = [tensors("b", staged=StagedTensors(problems=[problem]))]
    assert refused(engine, tensors("b"), other=bad).kind == "non-finite"
    assert engine.status().state == "serving"
    call(engine, tensors("a"))
    failed = [tensors("b", staged=Failure(kind="out-of-memory", message="no", status=507))]
    assert refused(engine, tensors("b"), other=failed).kind == "out-of-memory"
    assert refused(engine, tensors("b"), other=[]).kind == "rank-mismatch"
    assert [len({session for session, *_ in core.permits[:count]}) for count in (2, 4, 5)] == [1, 2, 3]


def test_a_sender_that_begins_again_must_bring_everything() -> None:
    engine = engine_of(LoadingCore())
    call(engine, tensors("a"))
    call(engine, LoadEvent(kind=LoadKind.AGAIN, call="a"), tensors("a"), tensors("b"))
    error = refused(engine, END)
    assert (error.kind, error.details["missing"]) == ("incomplete", ["c"])
    call(engine, tensors("c"))
    call(engine, LoadEvent(kind=LoadKind.BEGIN), tensors("a", "b"), END)
    assert engine.committer.live.epoch == 1


def test_a_call_that_fails_ends_the_update_and_its_error_stays() -> None:
    core = LoadingCore()
    engine = engine_of(core)
    engine.loads.before()
    core.events = [[tensors("a")], [tensors("a")]]
    engine.loads.after(RuntimeError("the trainer's own"))
    assert engine.status().state == "serving"
    assert "the trainer's own" in str(refused(engine, END))


def test_ranks_are_told_why_nothing_may_come() -> None:
    core = LoadingCore()
    engine = engine_of(core)
    opened: Any = engine.handle("open", {})
    engine.loads.before()
    engine.handle("abandon", {"id": opened.id})
    engine.loads.before()
    core.sleeps = True
    engine.loads.before()
    assert [refusal and refusal["kind"] for _, refusal, _ in core.permits] == ["update-open", None, "asleep"]


def test_a_poisoned_engine_is_healed_by_a_whole_update() -> None:
    engine = engine_of(LoadingCore())
    core: Any = engine.core
    core.accept_requests = lambda: None
    engine.committer.poisoned = "half of it"
    assert refused(engine, tensors("a", "b"), END).kind == "incomplete"
    call(engine, tensors(*NAMES), END)
    assert engine.committer.poisoned is None


def test_scales_of_the_kv_cache_are_those_of_the_tensors_by_name() -> None:
    layers = {"model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"}
    at = "model.layers.1.self_attn"
    expected = {
        "k_scale": "k",
        "attn.v_scale": "v",
        "attn.q_scale": "q",
        "kv_scale": "kv",
        "k_proj.k_scale": "k",
    }
    for name, kinds in expected.items():
        assert layer_scale(f"{at}.{name}", layers) == (f"{at}.attn", kinds)
    for name in (f"{at}.k_proj.weight", "model.layers.7.self_attn.k_scale", "k_scale"):
        assert layer_scale(name, layers) is None
