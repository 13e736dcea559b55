# SPDX-License-Identifier: Apache-2.0
"""Reaches into the engine core: one utility method for all calls of an update.

Adds `EngineCore.fp8ext`, which vLLM dispatches by name like its own utility methods, and to a core that is made for blockfp8
an id of its life, which its labels have. Replaced on an instance: the executor's `sleep` and `wake_up`, since staging must
not run into memory that is given back and what level 2 discards must not be served.
"""

import secrets
from functools import partial
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from vllm_fp8ext.compat.features import adopt, is_available
from vllm_fp8ext.compat.update import draft_acceptance, load_calls, recent_tokens, worker_replies
from vllm_fp8ext.compat.update.core_access import CoreAccess
from vllm_fp8ext.compat.update.core_thread import CoreThread
from vllm_fp8ext.compat.update.data_parallel import EngineCores, name_of
from vllm_fp8ext.compat.update.engine_changes import CHANGE, EngineChanges
from vllm_fp8ext.compat.update.heartbeat import answer_pulse
from vllm_fp8ext.compat.update.member_channel import listen
from vllm_fp8ext.compat.update.unloaded_names import DUMMY
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.config import METHOD, Settings
from vllm_fp8ext.update.contract.results import encode
from vllm_fp8ext.update.contract.update_errors import NO_CURRENT_WEIGHTS, NO_WEIGHTS, NOT_CURRENT

FEATURE: str = "core"
WHY: str = (
    "Take the calls of updates in the engine core: a plugin can neither add a method nor hear of sleep."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.engine.core:EngineCore._initialize_effective_attention_block_size",
    "vllm.v1.executor.abstract:Executor.sleep(level)",
    "vllm.v1.executor.abstract:Executor.wake_up(tags)",
)
USES: dict[str, tuple[str, ...]] = {
    "know whether the weights are asleep": ("vllm.v1.executor.abstract:Executor.sleeping_tags",),
    "dispatch our method by its name": ("vllm.v1.engine:EngineCoreRequestType.UTILITY",),
    "stop scheduling at a step boundary": ("vllm.v1.core.sched.interface:PauseState.PAUSED_ALL",),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/44910"
REMOVE_WHEN: str = "vLLM lets a plugin add an engine utility method and hear of sleep"


def install() -> None:
    """Add our method to the engine core. Idempotent."""
    EngineCore.fp8ext = call
    setattr(EngineCore, CHANGE, wait_for_change)
    load_calls.install()
    wrap(EngineCore, "_initialize_effective_attention_block_size", _wrap_initialize)


def _wrap_initialize(initialize: Any) -> Any:
    """Around what a core calls once it has a scheduler. A core in a process that was not forked loads plugins when it is
    being made: around `__init__` would be too late."""

    def initialized(self: Any) -> None:
        initialize(self)
        config = self.vllm_config
        if config.model_config.quantization != METHOD:
            return
        adopt(config)
        worker_replies.attach(self.model_executor)
        cores = EngineCores.of(config)
        self.fp8ext_instance = secrets.token_hex(8) if cores.count == 1 else name_of(self)[:16]
        settings = Settings.parse(config.additional_config)
        if cores.count > 1:
            self.fp8ext_thread = CoreThread(self)
            if cores.index > 0:
                listen(name_of(self), cores.index, self.fp8ext_thread, partial(_member_of, self))
        if settings.staging != "none":
            if cores.count == 1:
                load_calls.attach(self, _engine_of)
            reason = _awaited(settings, dummy=config.load_config.load_format == DUMMY)
            if reason is not None:
                _await_weights(self, reason)
        if settings.kernels.slot_fast_path and is_available("slot_fast_path"):
            from vllm_fp8ext.compat.speed import slot_fast_path

            slot_fast_path.attach(self.scheduler.kv_cache_manager)
        recent_tokens.attach(self, settings)
        draft_acceptance.attach(self)
        if is_available("output_interval"):
            from vllm_fp8ext.compat.speed import output_interval

            output_interval.attach(self, settings.serving)

    return initialized


def _awaited(settings: Settings, *, dummy: bool) -> str | None:
    """Tell why an engine generates nothing at first, if it is so. `dummy`: no weights were loaded."""
    dummy = dummy and settings.dummy_weights == "refuse"
    if settings.ready == "when_current":
        return NO_CURRENT_WEIGHTS if dummy else NOT_CURRENT
    return NO_WEIGHTS if dummy else None


def _await_weights(core: Any, reason: str) -> None:
    """Have a core that is being made refuse requests: the first one, or the first operation, makes its update engine."""
    core.fp8ext_awaits_weights = reason

    def add_first_request(*arguments: Any, **named: Any) -> None:
        if EngineCores.of(core.vllm_config).count > 1:
            _member_of(core)
        else:
            _engine_of(core)
        core.add_request(*arguments, **named)

    core.add_request = add_first_request


def call(self: Any, operation: str, arguments: dict[str, Any]) -> Any:
    """One operation of the update engine (`update.engine.engine`); made on first use. Never raises. Every answer also says
    why the engine is `poisoned`, or None: whatever was called may have ended an update that leaves it so. With several cores
    it returns a future.

    When it has not returned by the deadline a worker hangs: the process ends, and with it the server.
    """
    group = _group_of(self)
    if group is not None:
        return group.call(operation, arguments)
    engine = _engine_of(self)
    with self.fp8ext_watchdog.watching(operation):
        result = engine.handle(operation, arguments)
    self.fp8ext_changes.tell()
    return encode(result, engine.committer.poisoned)


def wait_for_change(self: Any, known: dict[str, Any] | None) -> Any:
    """Return a future of what holds (`UpdateEngine.change`) once that is not what the caller knows."""
    group = _group_of(self)
    if group is not None:
        return group.wait(known)
    _engine_of(self)
    return self.fp8ext_changes.wait(known)


def _group_of(core: Any) -> Any:
    """Return the update engine of several cores, of which this is the first; None of a core that is alone."""
    thread = getattr(core, "fp8ext_thread", None)
    if thread is not None and not hasattr(core, "fp8ext_group"):
        from vllm_fp8ext.compat.update.group_engine import GroupEngine

        core.fp8ext_group = GroupEngine(
            name_of(core),
            EngineCores.of(core.vllm_config).count,
            thread,
            partial(_member_of, core),
            awaits=getattr(core, "fp8ext_awaits_weights", None),
        )
        answer_pulse(core)
    return core.fp8ext_group if thread is not None else None


def _member_of(core: Any) -> Any:
    """Return the access of an update to one of several cores; made on first use, on the core's main thread."""
    from vllm_fp8ext.compat.update.core_member import CoreMember

    if not hasattr(core, "fp8ext_member"):
        awaits = hasattr(core, "fp8ext_awaits_weights")
        if awaits:
            del core.add_request
        core.fp8ext_member = CoreMember(core)
        if awaits:
            core.fp8ext_member.stop()
            core.fp8ext_member.refuse_requests()
    return core.fp8ext_member


def _engine_of(core: Any) -> Any:
    from vllm_fp8ext.update.engine.engine import UpdateEngine

    if not hasattr(core, "fp8ext_engine"):
        reason = getattr(core, "fp8ext_awaits_weights", None)
        if reason is not None:
            del core.add_request
        access = CoreAccess(core)
        core.fp8ext_engine, core.fp8ext_watchdog = UpdateEngine(access), access.watchdog
        core.fp8ext_changes = EngineChanges(core.fp8ext_engine.change)
        answer_pulse(core)
        if access.quantization == METHOD:
            _follow_asleep(core)
        if reason is not None:
            core.fp8ext_engine.committer.await_weights(reason)
    return core.fp8ext_engine


def _follow_asleep(core: Any) -> None:
    """Be there when memory is given back and taken again: not before, since running requests may be finished first."""
    executor, sleeping = core.model_executor, core.fp8ext_engine.sleeping
    give_back, take = executor.sleep, executor.wake_up

    def sleep(level: int = 1) -> None:
        if "weights" in executor.sleeping_tags:
            return give_back(level)
        with core.fp8ext_watchdog.watching("sleep"):
            sleeping.before(level)
        core.fp8ext_changes.tell()
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)  # whatever a commit did since vLLM paused it
        give_back(level)
        sleeping.begun(level)

    def wake_up(tags: list[str] | None = None) -> None:
        sleeping.waking()
        take(tags)
        sleeping.ended()

    executor.sleep, executor.wake_up = sleep, wake_up
