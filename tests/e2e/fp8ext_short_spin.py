# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin for tests: a reader of vLLM's message queues looks for a message every tenth of a millisecond for 20 ms after
one, and then sleeps until the next.

vLLM lets it spin for a second, and between two looks it leaves the core to others for no time at all. On a machine of two
cores the engine and its ranks then keep their cores from whom they wait for; with a rank pinned to each core, every request
and every commit stands still until that second is over. And the engine's other threads never get Python's lock: whoever waits
for it is woken each time that it is free, and finds it taken once there is a core; tokens of ten seconds come all at once.
"""

import time

SPIN_SECONDS = 0.02
"""Not 0: vLLM drops a notification that comes within a millisecond of another one."""


def register() -> None:
    """The entry point. Idempotent."""
    from vllm.distributed.device_communicators import shm_broadcast

    spin = shm_broadcast.SpinCondition.__init__
    assert spin.__defaults__ in ((1,), (SPIN_SECONDS,)), "busy_loop_s is another default"
    spin.__defaults__ = (SPIN_SECONDS,)
    assert callable(shm_broadcast.sched_yield), "it is called by another name"
    shm_broadcast.sched_yield = _pause


def _pause() -> None:
    time.sleep(1e-4)
