# SPDX-License-Identifier: Apache-2.0
"""Where an update's scales come from and what becomes of them: real ranks, a model of simple numbers, no engine."""

import logging
import math
from typing import Any

import pytest
import torch

from update.layers import scales
from update.ranks import NAMES, Core
from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.kernels.attention.kv_cache import next_scales
from vllm_fp8ext.update.contract.kv_request import KvRequest
from vllm_fp8ext.update.contract.rank_results import failures
from vllm_fp8ext.update.contract.results import Done, JobStarted, Progress
from vllm_fp8ext.update.engine.jobs import Flow, Jobs
from vllm_fp8ext.update.engine.kv_scales import KvEngine, ScaleSet

TOKENS = {"prompts": [[1, 7], [3]]}
"""Of which 7 is the largest, so with the default margin a scale is at least 14 / 448 = 2**-5."""
FIT = 2.0**-5

NOTHING_YET = {"granularity": "layer", "traffic": None, "rescaled": None}


class Story:
    """An engine and what it served: `update` prepares and commits, `prepare` stops before the commit."""

    def __init__(self, core: Core) -> None:
        self.core, self.epoch = core, 0
        self.jobs = Jobs(core.ranks)
        self.kv = KvEngine(core)
        self.went_on = 0
        self.given_up = False

    def prepare(self, told: Any = None) -> ScaleSet:
        asked = self.kv.request(told)
        assert asked is not None
        done: list[ScaleSet] = []
        result = self.jobs.start(self.preparing(asked, done))
        if isinstance(result, JobStarted):
            job = result.job
            while isinstance(result := self.jobs.poll(job), Progress):
                pass
        if isinstance(result, Failure):
            raise result.error
        [actual] = done
        return actual

    def preparing(self, asked: KvRequest, done: list[ScaleSet]) -> Flow[Done]:
        """What an update does beside: `done` gets the scales."""
        done.append((yield from self.kv.prepare(asked, self.epoch + 1, self._require_wanted)))
        self.went_on += 1
        return Done()

    def _require_wanted(self) -> None:
        if self.given_up:
            raise UpdateError("wrong-state", "given up")

    def commit(self, scales: ScaleSet | None, *, keep: bool = False, cached: str = "rescale") -> bool:
        results = self.core.ranks("swap")
        assert failures(results) == []
        self.epoch += 1
        return self.kv.exchanged(scales, keep=keep, cached=cached)

    def update(self, told: Any = None, **how: Any) -> ScaleSet:
        result = self.prepare(told)
        self.commit(result, **how)
        return result

    @property
    def device(self) -> dict[str, Any]:
        """What the first rank's device serves."""
        kv = self.core.fleet[0].kv
        assert kv is not None
        return kv.scales.served()


def story(policy: str = "calibrate", **how: Any) -> Story:
    core = Core(policy, **how)
    if policy != "static":
        core.begin()
    return Story(core)


def test_there_are_none_without_an_fp8_kv_cache_or_updates() -> None:
    core = Core("static", default=1.0)
    core.kv_cache_dtype = "auto"
    kv = KvEngine(core)
    assert (kv.enabled, kv.request({"policy": "static"}), kv.describe(0)) == (False, None, None)
    assert kv.exchanged(None, keep=True, cached="recompute") is False
    assert core.called == []
    for more in ({"staging": "none"}, {"kv_scales": None}):
        core = Core("static", default=1.0)
        core.settings = core.settings.model_copy(update=more)
        assert not KvEngine(core).enabled


def test_the_first_scales_are_calibrated_and_told() -> None:
    start = story()
    report = start.kv.report(0)
    assert report is not None
    told = report.as_dict()
    assert (told["policy"], told["source"], told["tokens"], told["epoch"], told["age"]) == (
        "calibrate",
        "built-in",
        64,
        0,
        0,
    )
    assert told["granularity"] == "layer"
    assert told["scales"] == start.device != scales(a=1.0, b=1.0)
    assert told["layers"].keys() == set(NAMES)
    assert 1 <= told["fit"]["k"]["headroom"] < 2
    assert told["fit"]["k"]["saturated_fraction"] == 0.0


def test_static_scales_are_those_of_the_start_and_stay() -> None:
    start = story("static", default=1.0)
    first = start.kv.served
    assert (first.policy, first.source, first.layers) == ("static", "start", {})
    assert start.update() is first
    assert "observe_kv" not in start.core.called
    assert start.kv.describe(1) == first.summary(1) | NOTHING_YET
    assert first.summary(1)["age"] == 1
    assert first.summary(1)["fit"] is None


def test_an_update_is_calibrated_with_its_own_prompts() -> None:
    start = story()
    start.core.factor("b", "v", 4.0)
    before = start.device
    result = start.prepare(TOKENS)
    assert start.device == before, "nothing is served before the commit"
    assert start.kv.describe(0) == start.kv.served.summary(0) | NOTHING_YET
    start.commit(result)
    assert (result.policy, result.source, result.tokens, result.epoch) == ("calibrate", "update", 3, 1)
    expected = scales(a=FIT, b=FIT)
    expected["b"]["v"] = [4 * FIT]
    assert start.device == expected == start.kv.served.scales
    assert start.went_on == 1


def test_server_and_trainer_compute_the_same_bits() -> None:
    start = story(scale_format="fp32", margin=0.5)
    start.core.factor("a", "k", 0.3)
    start.update(TOKENS)
    amax = (torch.tensor(7.0) * 0.3).bfloat16().float()
    wanted = next_scales(amax[None], torch.ones(1), margin=0.5, scale_format="fp32")
    assert start.device["a"]["k"] == wanted.tolist()


def test_what_was_served_last_counts_once_there_is_enough() -> None:
    start = story()
    assert start.update().source == "built-in"
    start.core.recent = [[2] * 10]
    result = start.update()
    assert (result.source, result.tokens) == ("recent", 10)
    assert start.device == scales(a=2.0**-6, b=2.0**-6)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_a_layer_of_which_nothing_is_known_keeps_its_scale(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    start = story()
    start.update(TOKENS)
    start.core.factor("a", "k", value)
    start.core.factor("a", "v", 2.0)
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        result = start.update(TOKENS)
    assert start.device["a"] == {"q": [FIT], "k": [FIT], "v": [2 * FIT]}
    report = result.layers["a"]["k"]
    assert all(map(math.isfinite, report.values())), "it is sent as JSON"
    assert report["saturated_fraction"] == (value != 0.0)
    assert ("K of a is beyond" in caplog.text) == (value != 0.0)


def test_the_largest_of_all_ranks_counts() -> None:
    start = story(ranks=2)
    start.core.factor("a", "k", 8.0, rank=1)
    result = start.update(TOKENS)
    assert result.scales["a"]["k"] == [8 * FIT]
    for rank in start.core.fleet:
        assert rank.kv is not None
        assert rank.kv.scales.served() == result.scales
    assert result.layers["a"]["k"]["headroom"] == 1.0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_head_has_its_own_on_whatever_rank_it_is(ranks: int) -> None:
    start = story(ranks=ranks, per_head=True)
    for rank in range(ranks // 2, ranks) if ranks > 1 else ():
        start.core.factor("a", "k", 4.0, rank=rank)
    result = start.update(TOKENS)
    assert result.scales["a"]["k"] == ([FIT, FIT] if ranks == 1 else [FIT, 4 * FIT])
    assert result.scales["a"]["v"] == [FIT, FIT]
    assert start.update(
        {"policy": "provided", "scales": {n: {"k": [1.0, 2.0], "v": 4.0} for n in NAMES}}
    ).scales["b"] == {"q": [FIT, FIT], "k": [1.0, 2.0], "v": [4.0, 4.0]}
    told = start.kv.describe(2)
    assert told is not None
    assert told["granularity"] == "head"


def test_the_trainers_scales_are_served_and_tried_on_tokens(caplog: pytest.LogCaptureFixture) -> None:
    start = story(warn_saturated=0.3)
    told = {"policy": "provided", "scales": {"a": {"k": 2.0**-7, "v": 0.1}, "b": {"k": 1.0, "v": 1.0}}}
    start.core.recent = [[7, 1, 1] * 4]
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        result = start.update(told)
    assert (result.policy, result.source, result.tokens) == ("provided", "trainer", 12)
    assert start.device["a"]["k"] == [2.0**-7]
    assert start.device["a"]["v"] == [float(torch.tensor(0.1))] == result.scales["a"]["v"]
    assert result.layers["a"]["k"]["saturated_fraction"] == pytest.approx(1 / 3)
    assert result.layers["a"]["k"]["headroom"] == -1.0
    assert (
        "0.333 of K of a is beyond the largest FP8 code with scales from trainer; more than 0.3"
        in caplog.text
    )
    assert " V of " not in caplog.text


def test_static_for_one_update_keeps_what_is_served() -> None:
    start = story()
    first = start.update(TOKENS)
    start.core.factor("a", "k", 100.0)
    assert start.update({"policy": "static"}) is first
    assert start.device == first.scales
    told = start.kv.describe(start.epoch)
    assert told is not None
    assert (told["policy"], told["epoch"], told["age"]) == ("calibrate", 1, 1)
    start.commit(None)  # a rollback
    assert start.device == first.scales == start.kv.served.scales


def test_a_rollback_brings_the_scales_back_and_another_takes_them_away() -> None:
    start = story()
    before, first = start.device, start.kv.served
    result = start.update(TOKENS)
    after = start.device
    assert after != before
    start.commit(None)
    assert (start.device, start.kv.served) == (before, first)
    start.commit(None)
    assert (start.device, start.kv.served) == (after, result)


def test_an_update_that_is_given_up_changes_nothing() -> None:
    start = story()
    start.update(TOKENS)
    before, served = start.device, start.kv.served
    start.core.factor("a", "k", 50.0)
    start.prepare(TOKENS)
    assert (start.device, start.kv.served) == (before, served)
    start.core.factor("a", "k", 1.0)
    start.update({"policy": "static"})
    assert (start.device, start.kv.served) == (before, served)


def history(**how: Any) -> Story:
    return story("history", margin=0.0, **how)


def recorded(start: Story, amax: float) -> float:
    """The scale of an update after this was written into the cache, times 448."""
    start.core.record(amax)
    result = start.update()
    assert (result.policy, result.source) == ("history", "history")
    return result.scales["a"]["k"][0] * 448


def test_history_is_the_largest_of_so_many_commits() -> None:
    start = history(history_length=3, scale_format="fp32")
    assert [recorded(start, amax) for amax in (448, 44800, 896, 448, 448, 448)] == [
        448,
        44800,
        44800,
        44800,
        896,
        448,
    ]
    assert "observe_kv" not in start.core.called, "it takes no time on the GPU"


def test_history_outlives_a_step_that_was_not_finite() -> None:
    start = history(history_length=4, scale_format="fp32")
    assert [recorded(start, amax) for amax in (448, float("nan"), 896, 448)] == [448, 448, 896, 896]


def test_what_was_saturated_in_the_cache_is_told(caplog: pytest.LogCaptureFixture) -> None:
    start = history()
    recorder: Any = start.core._kv(start.core.fleet[0]).recorder
    recorder.saturated = 2
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        recorded(start, 448.0)
    assert "0.25 of K of a is beyond the largest FP8 code as cached with scales of epoch 0" in caplog.text
    report = start.kv.report(1)
    assert report is not None
    told = report.as_dict()
    assert told["traffic_layers"].keys() == set(NAMES)
    for kind in ("k", "v"):
        traffic = told["traffic_layers"]["a"][kind]
        assert traffic["saturated_fraction"] == 0.25
        assert told["traffic"][kind] == traffic | {"worst": "a"}


def test_history_of_one_commit() -> None:
    start = history(history_length=1)
    assert [recorded(start, amax) for amax in (896, 448)] == [896, 448]


def test_most_recent_is_what_came_since_the_last_commit() -> None:
    start = history(history_algorithm="most_recent")
    assert [recorded(start, amax) for amax in (448, 44800, 896)] == [448, 57344, 896]


def test_without_traffic_the_scale_stays() -> None:
    start = history(history_algorithm="most_recent")
    recorded(start, 448 * 4)
    assert recorded(start, 0.0) == 448 * 4


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_an_update_that_is_given_up_loses_nothing_of_the_history(algorithm: str) -> None:
    start = history(history_algorithm=algorithm, history_length=2)
    recorded(start, 448 * 4)
    start.core.record(448 * 8)
    start.prepare()
    start.prepare()
    assert recorded(start, 448.0) == 448 * 8
    assert recorded(start, 448.0) == 448 * (8 if algorithm == "max" else 1)


def test_a_rollback_is_no_commit_of_the_history() -> None:
    start = history(history_length=2)
    recorded(start, 448 * 4)
    start.prepare()
    start.commit(None)
    start.commit(None)
    assert recorded(start, 448.0) == 448 * 4


def test_of_a_history_nothing_is_known_about_fit() -> None:
    start = history()
    recorded(start, 448.0)
    report = start.kv.report(1)
    assert report is not None
    told = report.as_dict()
    assert (told["fit"], told["layers"], told["tokens"]) == (None, {}, 0)


def test_what_running_requests_keep_is_rewritten() -> None:
    start = story()
    first = start.device["a"]["k"][0]
    result = start.prepare(TOKENS)
    assert start.commit(result, keep=True) is False
    ratio = first / FIT
    assert start.core.rescaled == [({n: {"k": [ratio], "v": [ratio]} for n in NAMES}, [[3, 4]])]
    told = start.kv.describe(1)
    assert told is not None
    assert told["rescaled"] == {"codes": 10, "saturated": 2, "flushed": 1}
    start.commit(None)
    assert (start.kv.describe(2) or {})["rescaled"] is None


@pytest.mark.parametrize(("keep", "same"), [(False, False), (True, True), (False, True)])
def test_nothing_is_rewritten_where_nothing_is_kept_or_nothing_changes(keep: bool, same: bool) -> None:
    start = story()
    start.update(TOKENS)
    result = start.prepare({"policy": "static"} if same else None)
    assert start.commit(result, keep=keep) is False
    assert start.commit(None, keep=False) is False
    assert start.core.rescaled == []
    assert "kv.rescale" not in start.core.called


def test_it_is_computed_again_when_that_was_asked_for() -> None:
    start = story()
    assert start.commit(start.prepare(TOKENS), keep=True, cached="recompute") is True
    assert start.commit(start.prepare({"policy": "static"}), keep=True, cached="recompute") is False
    assert "kv.rescale" not in start.core.called


@pytest.mark.parametrize("cached", ["rescale", "recompute"])
@pytest.mark.parametrize(("kind", "cached_otherwise"), [("q", False), ("k", True), ("v", True)])
def test_nothing_cached_changes_with_the_scale_of_queries(
    cached: str, kind: str, cached_otherwise: bool
) -> None:
    start = story()
    sent = {layer: {**kinds} for layer, kinds in start.kv.served.scales.items()}
    sent["b"][kind] = [2 * value for value in sent["b"][kind]]
    result = start.prepare({"policy": "provided", "scales": sent})
    recompute = start.commit(result, keep=True, cached=cached)
    assert start.device == result.scales == sent
    assert recompute is (cached_otherwise and cached == "recompute")
    assert ("kv.rescale" in start.core.called) is (cached_otherwise and cached == "rescale")


def test_it_is_computed_again_when_it_can_not_be_rewritten(caplog: pytest.LogCaptureFixture) -> None:
    start = story(ranks=2)
    start.core.problem = RuntimeError("a layout that nobody knows")
    result = start.prepare(TOKENS)
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        assert start.commit(result, keep=True) is True
    assert "computed again" in caplog.text
    assert "a layout that nobody knows" in caplog.text
    assert start.device == result.scales


@pytest.mark.parametrize(
    ("inplace", "broken", "told"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_scales_that_can_not_be_exchanged_take_the_weights_back(
    inplace: bool, broken: bool, told: bool
) -> None:
    """In place there is nothing to take back, and nobody knows what half-changed scales are."""
    start = story()
    actual = start.prepare(TOKENS)
    rank = start.core.fleet[0]
    shadow: Any = rank.shadow
    swaps: list[None] = []
    shadow.swap, shadow.weight_swap.inplace = lambda: swaps.append(None), inplace
    layer = shadow.layers["b"]
    layer._v_scale_cpu = _Fails(2 if broken else 1)
    before = start.device
    result = rank.swap()
    assert isinstance(result, Failure)
    assert result.kind == "exchange-failed"
    assert result.unchanged is not told
    assert len(swaps) == 2
    if not broken:
        assert start.device == before
    assert start.kv.served.scales == before
    shadow.weight_swap.broken = False
    start.prepare(TOKENS)
    start.commit(actual)
    assert start.device == actual.scales


class _Fails:
    def __init__(self, times: int) -> None:
        self.times = times

    def fill_(self, _: float) -> None:
        self.times -= 1
        if self.times >= 0:
            raise RuntimeError("no memory")


def test_an_error_while_tokens_are_looked_at_is_the_updates() -> None:
    start = story()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a kernel failed")

    start.core.fleet[0].shadow.model = broken
    with pytest.raises(UpdateError, match="a kernel failed"):
        start.prepare(TOKENS)
    assert start.went_on == 0


@pytest.mark.parametrize(("policy", "known"), [("calibrate", True), ("history", True), ("static", False)])
def test_only_a_cache_that_is_rewritten_is_warmed_up(policy: str, known: bool) -> None:
    """With `static` it may be laid out in a way that nobody here knows."""
    core = Core(policy, **({"default": 1.0} if policy == "static" else {}))
    kv = core.fleet[0].kv
    assert kv is not None
    kv.warm_up()
    assert ("cache.warm_up" in core.called) is known


def test_a_step_beyond_fp32_lets_cached_blocks_be_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    start = story()
    far = {"policy": "provided", "scales": {n: {"k": 1e30, "v": 1.0} for n in NAMES}}
    near = {"policy": "provided", "scales": {n: {"k": 1e-30, "v": 1.0} for n in NAMES}}
    start.update(far)
    with caplog.at_level(logging.WARNING):
        assert start.commit(start.prepare(near), keep=True) is True
    assert "expected positive finite ratios of scales" in caplog.text
    assert start.core.rescaled == []


@pytest.mark.parametrize("polls", [0, 1])
def test_a_preparation_that_another_one_overtakes_ends(polls: int) -> None:
    """Whoever waits until nothing is under way, before sleep say, would wait for it for ever."""
    start = story(tokens=16384)
    asked = start.kv.request({"prompts": [[1] * 40] * 240})
    assert asked is not None
    started = start.jobs.start(start.preparing(asked, []))
    assert isinstance(started, JobStarted)
    job = started.job
    for _ in range(polls):
        assert isinstance(start.jobs.poll(job), Progress)
    start.prepare(TOKENS)
    start.jobs.settle()
    told = start.jobs.poll(job)
    assert isinstance(told, Failure)
    assert told.kind == "wrong-state"
    assert start.went_on == 1


def test_scales_that_nobody_wants_any_more_are_not_staged() -> None:
    """The shadow may hold what a rollback would serve."""
    start = story()
    start.update(TOKENS)
    start.core.called.clear()
    start.given_up = True
    with pytest.raises(UpdateError, match="given up"):
        start.prepare(TOKENS)
    assert "observe_kv" in start.core.called
    assert "kv.stage" not in start.core.called
