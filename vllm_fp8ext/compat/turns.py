# SPDX-License-Identifier: Apache-2.0
"""Lets the threads of updates compute while the engine's thread waits for a step's output.

Replaces `AsyncOutputFuture.result`, in which an engine core waits whose worker is in its own process. Can go once Python's
threads compute side by side.
"""

from typing import Any

from vllm.v1.executor.uniproc_executor import AsyncOutputFuture

from vllm_fp8ext.weights.turns import turns

_result = AsyncOutputFuture.result


def take_turns() -> None:
    """From now on. Idempotent."""
    AsyncOutputFuture.result = result


def result(self: Any, timeout: float | None = None) -> Any:
    """The output of a step; lanes have the turn until it is there."""
    turns.give()
    try:
        return _result(self, timeout)
    finally:
        turns.take()
