# SPDX-License-Identifier: Apache-2.0
"""Work that goes on when its client has gone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from vllm_fp8ext.errors import UpdateError

T = TypeVar("T")

_WORK: set[asyncio.Future[Any]] = set()


def kept(work: Awaitable[T]) -> asyncio.Future[T]:
    """Work that is begun now and held on to until it ends, whoever waits for it."""
    task = asyncio.ensure_future(work)
    _WORK.add(task)
    task.add_done_callback(_WORK.discard)
    return task


async def finished(work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Await work that must run to its end even when the client goes away."""
    return await asyncio.shield(kept(work))


async def outcome(work: Awaitable[Any]) -> Any:
    """The result of some work, or the error that it was refused with."""
    try:
        return await work
    except UpdateError as error:
        return error


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """What a function returns that is called in a thread. A cancellation waits for its end."""
    call = asyncio.create_task(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait({call})
        raise
