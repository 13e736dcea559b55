# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin for tests: a reader of vLLM's message queues spins for 20 ms after a message, and then sleeps until the next.

vLLM lets it spin for a second. On a machine of two cores the engine and its ranks then keep their cores from whom they wait
for; with a rank pinned to each core, every request and every commit stands still until that second is over.
"""

SPIN_SECONDS = 0.02
"""Not 0: vLLM drops a notification that comes within a millisecond of another one."""


def register() -> None:
    """The entry point. Idempotent."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    assert SpinCondition.__init__.__defaults__ in ((1,), (SPIN_SECONDS,)), "busy_loop_s is another default"
    SpinCondition.__init__.__defaults__ = (SPIN_SECONDS,)
