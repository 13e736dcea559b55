# SPDX-License-Identifier: Apache-2.0
"""Merges messages that wait in the API server's queue, so that it catches up.

vLLM processes one message after the other, each output alone, and lets no stream write before the queue is empty: with more
tokens than it can process, gaps in streams grow without a bound. Here tokens of a request in several waiting messages are
processed together: the later the server, the more at once.
"""

from typing import Any

from vllm.v1.engine.core_client import AsyncMPClient

from vllm_fp8ext.compat.speed.output_interval import is_plain, join
from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "output_interval"
WHY: str = "Process the tokens of waiting messages together: vLLM processes one message after the other."
GAIN: str = "gaps of streams while the API server is late; not measured apart"
REPLACES: tuple[str, ...] = ("vllm.v1.engine.core_client:AsyncMPClient.get_output_async",)
USES: dict[str, tuple[str, ...]] = {
    "see which messages wait": ("vllm.v1.engine.core_client:AsyncMPClient.outputs_queue",),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's output handler does that"

_NEXT = "fp8ext_next_message"
"""Attribute of a client: a message that was taken from the queue and not returned."""
MOST_TOKENS = 64
"""Most tokens of a request's output to which more are added.

So one pass does not take too long.
"""


def install() -> None:
    """Idempotent."""
    wrap(AsyncMPClient, "get_output_async", _wrap_get_output_async)


def merge(early: Any, late: Any) -> None:
    """Move tokens of a request from `early` to `late`, where both have some.

    Both are `EngineCoreOutputs` of one engine and weight version. What else `early` says stays there.
    """
    if early.weight_version != late.weight_version or early.engine_index != late.engine_index:
        return
    before = {output.request_id: output for output in early.outputs if is_plain(output)}
    moved = set()
    for output in late.outputs:
        earlier = before.get(output.request_id)
        if earlier is not None and len(earlier.new_token_ids) < MOST_TOKENS:
            join(earlier, output)
            moved.add(output.request_id)
    early.outputs = [output for output in early.outputs if output.request_id not in moved]


def _wrap_get_output_async(original: Any) -> Any:
    async def get_output_async(self: Any) -> Any:
        message = self.__dict__.pop(_NEXT, None) or await original(self)
        if message.outputs and not self.outputs_queue.empty():
            late = await original(self)  # does not wait: this is the queue's only reader
            merge(message, late)
            setattr(self, _NEXT, late)
        return message

    return get_output_async
