# SPDX-License-Identifier: Apache-2.0
"""Commits over several engine cores: all of them or none, and what each of them is asked."""

import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import RankResult
from vllm_fp8ext.update.engine.committer import Committer
from vllm_fp8ext.update.engine.core_group import FRESH_SECONDS, CoreFacts, CoreGroup, CoreReply
from vllm_fp8ext.update.engine.kv_scales import KvEngine
from vllm_fp8ext.update.engine.session import Running
from vllm_fp8ext.update.engine.totals import Totals

from .scripted_core import NEW, ScriptedCore

RANKS = 2
"""Ranks of each core."""


class OneOfSeveral(ScriptedCore):
    """A core whose ranks are numbered after those of the cores before it. `asked`: methods in order."""

    weight_transfer = None
    device_type = "cpu"

    def __init__(self, index: int) -> None:
        super().__init__(RANKS)
        self.pid = 100 + index
        self.first = index * RANKS
        self.asked: list[str] = []
        self.stalled_until: float | None = None
        self.rescaled: list[Any] = []

    def ranks(self, method: str, *args: Any) -> list[RankResult]:
        if method == RankMethod.KV_RESCALE:
            self.rescaled.append(args)
            return []
        if method == RankMethod.SWAP and args:
            args = ([rank - self.first for rank in args[0] if 0 <= rank - self.first < RANKS],)
        return super().ranks(method, *args)

    def look(self) -> None:
        pass

    def held_blocks(self) -> list[Any]:
        return [self.pid]

    def recent_tokens(self) -> list[list[int]]:
        return [[self.pid, 1], [self.pid, 2]][: self.pid - 99]

    def enter(self, label: Any, recompute: bool) -> None:
        super().enter_epoch(label, recompute=recompute)

    def time_step(self) -> bool:
        return self.requests > 0

    def resume(self) -> float:
        super().resume()
        return 7.0 + self.first

    @property
    def facts(self) -> CoreFacts:
        ends, self.stalled_until = self.stalled_until, None
        return CoreFacts(
            pid=self.pid,
            paused=self.others_paused,
            unfinished=self.requests,
            asleep=False,
            interrupted=self.others_paused,
            compiled=[{"graphs": self.pid}],
            stalled_until=ends,
        )


class Link:
    """A `Member` on a core of this thread, which answers when it is asked for its answer."""

    renamed: ClassVar[dict[str, str]] = {"enter_epoch": "enter"}

    def __init__(self, core: OneOfSeveral) -> None:
        self._core = core

    def send(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._core.asked.append(name)
        self._call = (self.renamed.get(name, name), arguments)

    def receive(self) -> CoreReply:
        name, arguments = self._call
        try:
            result, error = getattr(self._core, name)(*arguments), None
        except Exception as raised:
            result, error = None, raised
        return CoreReply(result=result, error=error, facts=self._core.facts)


Step = Callable[[], Committer]


@pytest.fixture
def cores() -> list[OneOfSeveral]:
    return [OneOfSeveral(index) for index in range(2)]


@pytest.fixture
def group(cores: list[OneOfSeveral]) -> CoreGroup:
    return CoreGroup(cores[0], [Link(core) for core in cores])  # type: ignore[arg-type]  # the rest is not asked for


@pytest.fixture
def step(group: CoreGroup) -> Committer:
    return Committer(group, Totals(), KvEngine(group))


def run(step: Committer, running: Running = Running.KEEP) -> dict[str, float] | None:
    return step.run("update", NEW, running, None)


def test_every_core_is_stopped_before_any_rank_swaps(cores: list[OneOfSeveral], step: Committer) -> None:
    cores[1].requests = 3
    assert run(step) is not None
    for core in cores:
        assert core.swapped == [True, True]
        assert core.told[:2] == ["stop", "exchange [0, 1]"]
        assert core.told[-2:] == ["resume", "settle"]
        assert "epoch 1 step-1" in core.told


def test_a_commit_tells_how_far_apart_its_cores_go_on(step: Committer) -> None:
    phases = run(step)
    assert phases is not None
    assert phases["skew"] == RANKS


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_of_the_other_core_swap_back(cores: list[OneOfSeveral], step: Committer, failing: int) -> None:
    cores[failing].failures = [{1: False}]
    with pytest.raises(UpdateError) as refused:
        run(step)
    assert refused.value.kind == "exchange-failed"
    assert [core.swapped for core in cores] == [[False, False]] * 2
    assert [core.state for core in cores] == ["on", "on"]
    assert step.poisoned is None


@pytest.mark.parametrize("failing", [0, 1])
def test_where_that_fails_no_core_serves(cores: list[OneOfSeveral], step: Committer, failing: int) -> None:
    cores[failing].failures = [{0: True}]
    with pytest.raises(UpdateError) as refused:
        run(step)
    assert refused.value.kind == "poisoned"
    assert [core.state for core in cores] == ["paused", "paused"]
    assert all(core.refusing for core in cores)


def test_a_core_whose_caches_fail_poisons_all(cores: list[OneOfSeveral], step: Committer) -> None:
    cores[1].caches_fail = True
    with pytest.raises(UpdateError, match="no block pool"):
        run(step)
    assert all(core.refusing for core in cores)


def test_a_commit_waits_for_the_requests_of_every_core(cores: list[OneOfSeveral], step: Committer) -> None:
    cores[1].requests = 1
    assert run(step, Running.WAIT) is None
    assert [core.state for core in cores] == ["admits no more"] * 2
    cores[1].requests = 0
    time.sleep(2 * FRESH_SECONDS)
    assert run(step, Running.WAIT) is not None
    assert [core.state for core in cores] == ["on", "on"]


def test_one_that_others_have_paused_is_in_the_way(cores: list[OneOfSeveral], step: Committer) -> None:
    cores[1].others_paused = True
    time.sleep(2 * FRESH_SECONDS)
    with pytest.raises(UpdateError) as refused:
        run(step)
    assert refused.value.kind == "paused"
    assert not cores[0].told


def test_a_stall_ends_with_the_last_core(
    cores: list[OneOfSeveral], group: CoreGroup, step: Committer
) -> None:
    for core in cores:
        core.requests = 1
    run(step)
    start = step.paused[0]
    cores[0].stalled_until = start + 5
    group.irreplaceable()
    assert step.stall_seconds is None
    cores[1].stalled_until = start + 3
    group.irreplaceable()
    assert step.stall_seconds == pytest.approx(5)


def test_each_core_is_told_its_own_blocks(cores: list[OneOfSeveral], group: CoreGroup) -> None:
    group.ranks(RankMethod.KV_RESCALE, group.held_blocks())
    assert [core.rescaled for core in cores] == [[([100],)], [([101],)]]


def test_what_all_cores_know_is_put_together(cores: list[OneOfSeveral], group: CoreGroup) -> None:
    cores[1].requests, cores[0].requests = 2, 1
    assert group.recent_tokens() == [[100, 1], [101, 1], [101, 2]]
    assert group.unfinished() == 3
    assert group.compiled == [{"graphs": 100}, {"graphs": 101}]
    assert group.pids == [100, 101]
    assert group.irreplaceable() == 0


def test_what_was_just_told_is_not_asked_again(cores: list[OneOfSeveral], group: CoreGroup) -> None:
    asked = len(cores[0].asked)
    assert (group.paused(), group.asleep(), group.unfinished()) == (False, False, 0)
    assert len(cores[0].asked) <= asked + 1
