# SPDX-License-Identifier: Apache-2.0
"""Hears of the end of the next engine step.

Replaced on an instance: `post_step`, for one step after an exchange.
"""

from collections.abc import Callable
from typing import Any

FEATURE: str = "core"
WHY: str = "Time the stall of an exchange: a plugin does not hear when a step ends."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.engine.core:EngineCore.post_step(model_executed)",)
USES: dict[str, tuple[str, ...]] = {
    "tell steps in flight from those to come": ("vllm.v1.engine.core:EngineCore.batch_queue",),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/44910"
REMOVE_WHEN: str = "vLLM tells a plugin when a step ends"


def time_next_step(core: Any, report: Callable[[], None]) -> None:
    """Call `report` at the end of the next engine step, or never without one.

    An earlier report that still waits is forgotten.
    """
    vars(core).pop("post_step", None)
    if not core.scheduler.has_requests():
        return
    original = core.post_step
    queued = len(core.batch_queue or ())

    def counted(executed: bool) -> None:
        nonlocal queued
        before, queued = queued, len(core.batch_queue or ())
        original(executed)
        # to queue a step ends like a step, once for each that goes into the queue before an output is waited for
        if core.batch_queue is None or 0 < before >= queued:
            del core.post_step
            report()
        elif not core.batch_queue and not core.scheduler.has_requests():
            del core.post_step  # the next step is of another time

    core.post_step = counted
