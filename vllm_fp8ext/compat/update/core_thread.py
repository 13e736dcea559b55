# SPDX-License-Identifier: Apache-2.0
"""Runs calls of other threads on an engine core's main thread, between two steps."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from vllm.v1.engine import EngineCoreRequestType

from vllm_fp8ext.compat.wrapping import wrap_instance

FEATURE: str = "core"
WHY: str = (
    "Call an engine core between two steps from another thread: its queue of input takes vLLM's own calls."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.engine.core:EngineCoreProc._handle_client_request(request_type, request)",
)
USES: dict[str, tuple[str, ...]] = {
    "call an engine core between two steps": (
        "vllm.v1.engine.core:EngineCoreProc.input_queue",
        "vllm.v1.engine:EngineCoreRequestType.WAKEUP",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's engine core takes calls from other threads of its process"

T = TypeVar("T")


class CoreThread:
    """The main thread of one engine core: it takes a call as soon as the step under way has ended."""

    def __init__(self, core: Any) -> None:
        self._queue = core.input_queue
        wrap_instance(core, "_handle_client_request", _wrap_handle_client_request)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Run a call there. Returns the future of its result."""
        run, future = settling(call)
        self._queue.put_nowait((EngineCoreRequestType.WAKEUP, run))
        return future


def settling(call: Callable[[], T]) -> "tuple[Callable[[], None], Future[T]]":
    """Return what runs a call, and the future of its outcome."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    return run, future


def _wrap_handle_client_request(original: Any) -> Any:
    def handle(request_type: Any, request: Any) -> None:
        if request_type is EngineCoreRequestType.WAKEUP and callable(request):
            request()
        else:
            original(request_type, request)

    return handle
