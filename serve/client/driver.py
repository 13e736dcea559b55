# SPDX-License-Identifier: Apache-2.0
"""Runs flows: the only place of the client that does I/O, once blocking and once on an event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from vllm_fp8ext.serve.client.flow import Flow, Request, Step, Together, Wait, Work

T = TypeVar("T")

CONNECT_SECONDS = 30.0
"""Longest time to wait for a connection."""
_LIMITS = httpx.Limits(max_connections=None)


class BlockingDriver:
    """Runs a flow on the caller's thread; flows that run together get a thread each."""

    def __init__(self) -> None:
        self._http = httpx.Client(limits=_LIMITS)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def run(self, flow: Flow[T]) -> T:
        """What the flow returns. Whatever interrupts a step is thrown into the flow, so that it can clean up."""
        try:
            step = next(flow)
            while True:
                try:
                    result = self._take(step)
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(result)
        except StopIteration as end:
            value: T = end.value
            return value

    def _take(self, step: Step) -> Any:
        match step:
            case Request():
                content = None if step.content is None else _counted(step)
                return self._http.request(step.method, step.url, content=content, **_options(step))
            case Wait(seconds):
                return time.sleep(seconds)
            case Work(function):
                return function()
            case Together(flows):
                with ThreadPoolExecutor(max(1, len(flows))) as threads:
                    return list(threads.map(self._outcome, flows))

    def _outcome(self, flow: Flow[T]) -> T | Exception:
        try:
            return self.run(flow)
        except Exception as error:
            return error


class AsyncDriver:
    """Runs a flow as a coroutine. Work, and the reading of bodies, is done in a thread. `transport`: how requests reach their
    server, when that is no network."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._http = httpx.AsyncClient(limits=_LIMITS, transport=transport)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def run(self, flow: Flow[T]) -> T:
        """What the flow returns. A cancellation too is thrown into the flow, so that it can clean up."""
        try:
            step = next(flow)
            while True:
                try:
                    result = await self._take(step)
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(result)
        except StopIteration as end:
            value: T = end.value
            return value

    async def _take(self, step: Step) -> Any:
        match step:
            case Request():
                content = None if step.content is None else _counted_in_thread(step)
                return await self._http.request(step.method, step.url, content=content, **_options(step))
            case Wait(seconds):
                return await asyncio.sleep(seconds)
            case Work(function):
                return await asyncio.to_thread(function)
            case Together(flows):
                return await asyncio.gather(*map(self._outcome, flows))

    async def _outcome(self, flow: Flow[T]) -> T | Exception:
        try:
            return await self.run(flow)
        except Exception as error:
            return error


def _options(step: Request) -> dict[str, Any]:
    timeout = httpx.Timeout(step.timeout, connect=min(step.timeout, CONNECT_SECONDS))
    return {"headers": step.headers, "timeout": timeout, "json": step.json}


def _counted(step: Request) -> Iterator[bytes]:
    count = 0
    for piece in step.content or ():
        yield piece
        count += len(piece)
        if step.sent:
            step.sent(count)


async def _counted_in_thread(step: Request) -> AsyncIterator[bytes]:
    count = 0
    pieces = iter(step.content or ())
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
        count += len(piece)
        if step.sent:
            step.sent(count)
