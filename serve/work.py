# SPDX-License-Identifier: Apache-2.0
"""Work that goes on when its client has gone."""

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from vllm_fp8ext.errors import UpdateError

T = TypeVar("T")

_WORK: set[asyncio.Future[Any]] = set()


def keep_running(work: Awaitable[T]) -> asyncio.Future[T]:
    """Begin work, and hold on to it until it ends, whoever waits for it."""
    task = asyncio.ensure_future(work)
    _WORK.add(task)
    task.add_done_callback(_WORK.discard)
    return task


async def run_to_end(work: Awaitable[T]) -> T:
    """Await work that must run to its end even when the client goes away."""
    return await asyncio.shield(keep_running(work))


async def outcome(work: Awaitable[Any]) -> Any:
    """The result of some work, or the error that it was refused with."""
    try:
        return await work
    except UpdateError as error:
        return error


async def in_thread(function: Callable[..., T], *arguments: Any, executor: Executor | None = None) -> T:
    """Call a function in a thread, and return its result. It is one of the loop's own threads if there is no other
    `executor`. A cancellation waits for its end."""
    context = contextvars.copy_context()
    call = asyncio.get_running_loop().run_in_executor(executor, partial(context.run, function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        while not call.done():
            with contextlib.suppress(asyncio.CancelledError):  # another one
                await asyncio.wait({call})
        if not call.cancelled():
            call.exception()  # nobody asks
        raise
