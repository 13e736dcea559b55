# SPDX-License-Identifier: Apache-2.0
"""Takes in every worker's reply to a call that one of them failed.

The executor of several processes raises at the first failure and leaves the others' replies unread: each later call would get
the answers of the one before it.
"""

from typing import Any

FEATURE: str = "core"
WHY: str = "Read every worker's reply to a call that failed: vLLM leaves the others' unread."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc(unique_reply_rank, non_block)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM reads them all"


def attach(executor: Any) -> None:
    """Have an executor of several processes read all replies to a call."""
    if not hasattr(executor, "response_mqs"):
        return
    call = executor.collective_rpc

    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("non_block") or kwargs.get("unique_reply_rank") is not None:
            return call(method, *args, **kwargs)
        queues = executor.response_mqs
        reply_queues = [_ReplyQueue(queue) for queue in queues]
        executor.response_mqs = reply_queues
        try:
            return call(method, *args, **kwargs)
        except RuntimeError as error:
            if str(error).startswith("Worker failed with error"):  # it answered, and so do the others
                for queue in reply_queues:
                    if queue.waits:
                        queue.dequeue()
            raise
        finally:
            executor.response_mqs = queues

    executor.collective_rpc = collective_rpc


class _ReplyQueue:
    """A worker's queue of replies, of which one is due to a call. `waits`: it was not read yet, where others were."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.waits = True

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        self.waits = False
        return self._queue.dequeue(*args, **kwargs)
