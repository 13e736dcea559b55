# SPDX-License-Identifier: Apache-2.0
"""One engine core of several, as their update engine sees it.

Calls come between two steps, in the order that they were made. Between `stop` and `resume` the core begins no step of
requests; what others ask of the scheduler meanwhile holds afterwards.

Replaced on an instance: the scheduler's `set_pause_state`, and of cores that step together `add_request`, between those two.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import DPEngineCoreProc

from vllm_fp8ext.compat.update.core_access import CoreAccess
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.labels import Label
from vllm_fp8ext.update.engine.core_group import CoreFacts, CoreReply

FEATURE: str = "core"
WHY: str = "Exchange weights in several engine cores at once: vLLM's pause leaves them in different states."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.engine.core:EngineCore.add_request(request)",
    "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state(pause_state)",
)
USES: dict[str, tuple[str, ...]] = {
    "let ranks that step together meet in their collectives": (
        "vllm.v1.engine.core:DPEngineCoreProc",
        "vllm.v1.engine.core:EngineCoreProc.engines_running",
        "vllm.v1.engine.core:DPEngineCoreProc.current_wave",
        "vllm.v1.engine.core:DPEngineCoreProc.ignore_start_dp_wave",
        "vllm.v1.engine:EngineCoreOutputs(start_wave)",
    ),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/44910"
REMOVE_WHEN: str = "vLLM lets a plugin hold the schedulers of all data-parallel ranks"

CALLS = frozenset(
    {
        *("look", "ranks", "held_blocks", "recent_tokens", "stop", "drain", "resume", "unpause"),
        *("admit_no_more", "irreplaceable", "abort_running", "refuse_requests", "accept_requests"),
        *("restart_prompts", "enter_epoch", "relabel", "time_step"),
    }
)
"""Methods that the update engine calls."""


class CoreMember(CoreAccess):
    """Access to one core of several."""

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self._before: PauseState | None = None
        """How others had paused the scheduler when it was stopped; None while it is not."""
        self._stalled_until: float | None = None
        self._refusing = False
        self._in_step = isinstance(core, DPEngineCoreProc)
        """True if the cores step together: a mixture of experts."""

    def answer(self, name: str, arguments: tuple[Any, ...]) -> CoreReply:
        """Run a method, and say what the core is like then. Never raises."""
        result, failed = None, None
        try:
            if name not in CALLS:
                raise UpdateError("internal", f"expected a call of an engine core, found {name}", status=500)
            with self.watchdog.watching(name):
                result = getattr(self, name)(*arguments)
        except UpdateError as error:
            failed = error
        except Exception as error:
            failed = UpdateError("internal", f"{type(error).__name__}: {error}", status=500)
        return CoreReply(result=result, error=failed, facts=self._facts())

    def look(self) -> None:
        """Do nothing: the answer says what the core is like."""

    def stop(self) -> None:
        """Begin no step of requests until `resume`; those in flight go on.

        Cores that step together finish these first: the experts of a rank that exchanges early are of another epoch.
        """
        if self._before is None:
            self._before = self.pause_state()
        self._core.scheduler.set_pause_state = self._wishes.append
        self._set_pause_state(PauseState.PAUSED_ALL)
        self._meet_others()
        if self._in_step:
            self.drain()

    def admit_no_more(self) -> None:
        """Go on with the requests that run, unless others pause the core; new ones wait until `resume`."""
        if self._before is None:
            self._before = self.pause_state()
        super().admit_no_more()
        self._meet_others()

    def resume(self) -> float:
        """Schedule again as others want it; when, by `time.perf_counter()`, which the cores of a machine share."""
        if self._before is None:
            return time.perf_counter()
        self._set_pause_state(self._before)
        self._before = None
        self.release()
        if self._in_step:
            if not self._refusing:
                self._core.add_request = self._add_request
            if self._core.scheduler.has_unfinished_requests():
                self._step_together()
        return time.perf_counter()

    def refuse_requests(self) -> None:
        """End every request with an error, and each one that comes, until `accept_requests`."""
        self._refusing = True
        super().refuse_requests()
        if self._in_step:
            refuse = self._core.add_request
            self._core.add_request = self._then_step_together(refuse)

    def accept_requests(self) -> None:
        """Undo `refuse_requests`."""
        self._refusing = False
        super().accept_requests()
        if self._before is not None:
            self._meet_others()

    def enter_epoch(self, label: Label, recompute: bool) -> None:
        """Mark every token sampled from now on (`CoreAccess.enter_epoch`)."""
        super().enter_epoch(label, recompute=recompute)

    def time_step(self) -> bool:
        """Note the end of the next step, if there are requests; returns whether there are."""
        self._stalled_until = None
        if not self._core.scheduler.has_requests():
            return False
        self.time_next_step(self._note_end)
        return True

    def _note_end(self, end: float) -> None:
        self._stalled_until = end

    def _facts(self) -> CoreFacts:
        ends, self._stalled_until = self._stalled_until, None
        return CoreFacts(
            pid=os.getpid(),
            paused=self._before is None and self.paused(),
            unfinished=self.unfinished(),
            asleep=self.asleep(),
            interrupted=self.interrupted(),
            compiled=self.compiled,
            stalled_until=ends,
        )

    def _meet_others(self) -> None:
        """Have requests that must wait start this core's steps as those of the others."""
        if self._in_step and not self._refusing:
            self._core.add_request = self._add_request_in_step

    def _add_request_in_step(self, *arguments: Any, **named: Any) -> None:
        self._add_request(*arguments, **named)
        self._step_together()

    def _then_step_together(self, refuse: Callable[..., None]) -> Callable[..., None]:
        def refused(*arguments: Any, **named: Any) -> None:
            refuse(*arguments, **named)
            self._step_together()

        return refused

    def _step_together(self) -> None:
        """Have all ranks run, as vLLM's `add_request` does.

        vLLM tells the other ranks of a request that comes to one: they wait for it in their collectives. A stopped one meets
        them there with an empty step, after which all of them rest.
        """
        core = self._core
        if core.engines_running or core.ignore_start_dp_wave:
            return
        core.engines_running = True
        core.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=core.current_wave)))
