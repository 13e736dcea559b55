# SPDX-License-Identifier: Apache-2.0
"""Updates by vLLM's own weight transfer end by themselves, and with them pauses."""

from dataclasses import replace
from typing import Any

import pytest
from shared_exports import shared_exports

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.native_handles import plain
from vllm_fp8ext.update.contract.rank_results import Accepted, RankProgress, RankResult, StagedTensors
from vllm_fp8ext.update.contract.results import Done, EngineStatus, Finishing, JobStarted
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.engine.engine import UpdateEngine
from vllm_fp8ext.update.engine.native import IPC, NCCL
from vllm_fp8ext.update.engine.timestamp import Moment

from .test_engine import IdleCore

SPEC = TensorSpec("w", (2,), "bfloat16")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> Moment:
        return Moment(self.seconds, self.seconds)


class TransferCore(IdleCore):
    """A core with weight transfer, whose ranks do at once what they are told, and tell of nothing wrong."""

    weight_transfer: str | None = NCCL
    device_type = "cpu"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = Settings.parse({"fp8ext": settings})
        self.is_paused = False
        self.compiled: list[dict[str, int]] = []
        self.received: list[Any] = []

    def paused(self) -> bool:
        return self.is_paused

    def unpause(self) -> None:
        self.is_paused = False
        self.compiled: list[dict[str, int]] = []

    def ranks(self, method: str, *arguments: Any) -> list[RankResult]:
        if method == "poll":
            return [StagedTensors()]
        self.received.append((method, arguments))
        return [Accepted()]


def engine_of(core: TransferCore, clock: Clock) -> UpdateEngine:
    engine = UpdateEngine(core, clock)  # type: ignore[arg-type]  # the rest is not asked for
    piece = ShardSlice(0, "w", (2,), ((0, 2),), (0,), False, "bfloat16")
    engine._model._manifest = Manifest({"w": SPEC}, frozenset(), {"w": (piece,)}, "fp32", 1)
    return engine


def started(core: TransferCore, clock: Clock) -> UpdateEngine:
    engine = engine_of(core, clock)
    assert isinstance(engine.handle("native_start", {}), Done)
    return engine


def failure(result: object) -> Failure:
    assert isinstance(result, Failure)
    return result


def status(engine: UpdateEngine) -> EngineStatus:
    result = engine.handle("status", {})
    assert isinstance(result, EngineStatus)
    return result


def job(result: object) -> int:
    assert isinstance(result, JobStarted)
    return result.job


def test_an_update_that_nobody_finishes_expires_and_its_pause_ends() -> None:
    core, clock = TransferCore(native_update_seconds=10), Clock()
    engine = started(core, clock)
    core.is_paused = True
    clock.seconds = 9.0
    assert status(engine).state == "updating"
    assert core.is_paused
    clock.seconds = 11.0
    assert status(engine).state == "serving"
    assert not core.is_paused
    finished = engine.handle("native_finishing", {})
    assert failure(finished).kind == "no-update"
    assert "expired" in failure(finished).message
    assert isinstance(engine.handle("native_start", {}), Done)


def test_a_pause_from_before_outlasts_the_update() -> None:
    core, clock = TransferCore(native_update_seconds=10), Clock()
    core.is_paused = True
    engine = started(core, clock)
    clock.seconds = 11.0
    engine.handle("status", {})
    assert core.is_paused


def test_a_pause_lasts_unless_it_has_a_deadline() -> None:
    core, clock = TransferCore(), Clock()
    engine = engine_of(core, clock)
    core.is_paused = True
    assert status(engine).paused_seconds == 0.0
    clock.seconds = 1e6
    assert status(engine).paused_seconds == 1e6
    assert core.is_paused


def test_a_pause_ends_at_its_deadline() -> None:
    core, clock = TransferCore(pause_deadline_seconds=30), Clock()
    engine = engine_of(core, clock)
    core.is_paused = True
    engine.handle("status", {})
    clock.seconds = 29.0
    engine.handle("status", {})
    assert core.is_paused
    clock.seconds = 31.0
    assert status(engine).paused_seconds is None
    assert not core.is_paused


def test_a_server_without_weight_transfer_says_how_to_have_it() -> None:
    core = TransferCore()
    core.weight_transfer = None
    result = engine_of(core, Clock()).handle("native_init", {"info": {}})
    assert failure(result).kind == "no-transfer-engine"
    assert "--weight-transfer-config" in failure(result).message


def test_what_is_refused_beforehand_is_received_all_the_same() -> None:
    core, clock = TransferCore(), Clock()
    engine = engine_of(core, clock)
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    joining = engine.handle("native_init", {"info": info})
    assert engine.handle("poll", {"job": job(joining)}) == Done()
    engine.handle("native_start", {})
    core.received.clear()
    update = {"names": ["v", "w"], "dtype_names": ["bfloat16"] * 2, "shapes": [[3], [2]]}
    receiving = engine.handle("native_update", {"info": update})
    [(method, arguments)] = core.received
    assert (method, arguments[2]["parts"], arguments[3]) == ("stage", (6, 4), [])
    done = engine.handle("poll", {"job": job(receiving)})
    assert failure(done).kind == "unknown-tensor"
    assert status(engine).state == "serving"


@pytest.mark.parametrize("complete", [False, True])
def test_a_setting_asks_for_the_whole_manifest(complete: bool) -> None:
    core = TransferCore(native_complete=complete)
    engine = started(core, Clock())
    [session] = engine.updates.sessions.values()
    assert session.partial is not complete


def test_a_poisoned_engine_takes_a_whole_update_alone() -> None:
    engine = engine_of(TransferCore(), Clock())
    engine.committer.poisoned = "half of it"
    engine.handle("native_start", {})
    [session] = engine.updates.sessions.values()
    assert not session.partial


def test_versions_that_can_not_be_are_refused() -> None:
    engine = engine_of(TransferCore(), Clock())
    for version in ("", "a\x1fb", "x" * 257, 7):
        assert failure(engine.handle("native_relabel", {"version": version})).kind == "invalid-request"


class SlowCore(TransferCore):
    """Its ranks go on with what they were told until `done`."""

    done = False

    def ranks(self, method: str, *arguments: Any) -> list[RankResult]:
        if method == "poll" and not self.done:
            return [RankProgress()]
        return super().ranks(method, *arguments)


INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
TWO_BROADCASTS = {"names": ["w", "v"], "dtype_names": ["bfloat16"] * 2, "shapes": [[2], [3]]}


def joined(engine: UpdateEngine, core: SlowCore) -> None:
    core.done = True
    joining = engine.handle("native_init", {"info": INIT | {"packed": True, "packed_buffer_size_bytes": 1}})
    assert engine.handle("poll", {"job": job(joining)}) == Done()
    core.done = False


def test_an_update_that_has_ended_leaves_the_next_trainers_group_alone() -> None:
    """What it was still to receive comes no more: its ranks would take it from, or leave, the new group."""
    core, clock = SlowCore(), Clock()
    engine = engine_of(core, clock)
    joined(engine, core)
    engine.handle("native_start", {})
    receiving = job(engine.handle("native_update", {"info": TWO_BROADCASTS}))
    engine.handle("native_failed", {"reason": UpdateError("engine-timeout", "too late").as_dict()})
    joined(engine, core)
    engine.handle("native_start", {})
    core.received.clear()
    core.done = True
    failure(engine.handle("poll", {"job": receiving}))
    assert core.received == []
    assert status(engine).state == "updating"


def test_two_calls_do_not_bring_tensors_at_the_same_time() -> None:
    core, clock = SlowCore(), Clock()
    engine = engine_of(core, clock)
    joined(engine, core)
    engine.handle("native_start", {})
    info = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2]]}
    receiving = job(engine.handle("native_update", {"info": info}))
    for operation, arguments in (("native_update", {"info": info}), ("native_finishing", {})):
        assert failure(engine.handle(operation, arguments)).kind == "staging"
    core.done = True
    assert engine.handle("poll", {"job": receiving}) == Done()
    assert isinstance(engine.handle("native_finishing", {}), Finishing)


class HalfCore(SlowCore):
    """Two ranks, the last of which can't begin what both are told while `fails`."""

    fails = False

    def ranks(self, method: str, *arguments: Any) -> list[RankResult]:
        [first] = super().ranks(method, *arguments)
        failed = Failure(kind="internal", message="an injected fault", status=500)
        return [first, failed if self.fails and method == "stage" and arguments[3] else first]


def test_ranks_leave_a_group_in_which_one_of_them_is_behind() -> None:
    """The other one has received what this one has not."""
    core, clock = HalfCore(), Clock()
    engine = engine_of(core, clock)
    engine._model._manifest = replace(engine._model.manifest(), world_size=2)
    info = {"info": INIT | {"world_size": 3}}
    core.done = True
    assert engine.handle("poll", {"job": job(engine.handle("native_init", info))}) == Done()
    engine.handle("native_start", {})
    core.received.clear()
    core.fails = True
    update = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2]]}
    receiving = engine.handle("native_update", {"info": update})
    assert failure(engine.handle("poll", {"job": job(receiving)})).kind == "internal"
    natives = [arguments[2]["native"] for method, arguments in core.received if method == "stage"]
    assert natives == [1, 0]
    engine.handle("native_start", {})
    assert failure(engine.handle("native_update", {"info": update})).kind == "not-initialized"


def test_handles_reach_the_ranks_as_plain_data() -> None:
    core, clock = TransferCore(), Clock()
    core.weight_transfer = IPC
    engine = engine_of(core, clock)
    assert engine.handle("native_init", {"info": {"packed": True}}) == Done()
    engine.handle("native_start", {})
    with shared_exports() as exports:
        handles = plain({"cpu": exports.reduce(exports.buffer(4))[1]})
    told = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2]], "ipc_handles": handles}
    reading = engine.handle("native_update", {"info": {**told, "tensor_sizes": [4]}})
    assert engine.handle("poll", {"job": job(reading)}) == Done()
    [(method, arguments)] = core.received
    assert (method, arguments[2]["transport"], arguments[3]) == (
        "stage",
        "native_ipc",
        [["w", [2], "bfloat16", 0, 4]],
    )
    core.received.clear()
    assert isinstance(engine.handle("native_finishing", {}), Finishing)
    assert [method for method, _ in core.received] == ["close_sources"]
    engine.handle("native_update", {"info": {**told, "tensor_sizes": [5]}})
    assert failure(engine.handle("native_finishing", {})).kind == "no-update"
