# SPDX-License-Identifier: Apache-2.0
"""Runs flows: the only place of the client that does I/O, once blocking and once on an event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import httpx

from vllm_fp8ext.serve.client.flow import Flow, Pipelined, Request, Step, Together, Wait, Work
from vllm_fp8ext.serve.client.network import AsyncNetwork, Network
from vllm_fp8ext.serve.work import in_thread

T = TypeVar("T")

CONNECT_SECONDS = 30.0
"""Longest time to wait for a connection."""
FLOW_THREADS = "fp8ext-flow"
"""How names of threads begin that the blocking driver starts."""
_LEAVE_SECONDS = 2.0
"""How long calls under way are waited for when the caller was interrupted: a commit may wait for running requests."""


class _Stopped(Exception):
    """Thrown into a flow that runs beside one that has failed."""


class _Stop(threading.Event):
    """An event with events inside, which are set with it, or alone."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[_Stop] = []

    def inner(self) -> "_Stop":
        """One inside."""
        stop = _Stop()
        self._inside.append(stop)
        if self.is_set():  # perhaps after those inside were set
            stop.set()
        return stop

    def set(self) -> None:
        super().set()
        for stop in self._inside:
            stop.set()


class BlockingDriver:
    """Runs a flow on the caller's thread; flows that run at the same time get a thread each. `transport`: how requests reach
    their server, when not as the environment says."""

    def __init__(self, transport: httpx.BaseTransport | None = None) -> None:
        self._http = httpx.Client(transport=transport or Network())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def run(self, flow: Flow[T]) -> T:
        """Run a flow, and return its result. Whatever interrupts a step is thrown into the flow, so that it can clean up."""
        return self._run(flow, _Stop())

    def _run(self, flow: Flow[T], stop: _Stop) -> T:
        """Run a flow until `stop` is set. Each step then results in `_Stopped`, and a body under way breaks off with it."""
        try:
            step = next(flow)
            while True:
                try:
                    result = self._take(step, stop)
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(result)
        except StopIteration as end:
            value: T = end.value
            return value

    def _take(self, step: Step, stop: _Stop) -> Any:
        _go_on(stop)
        match step:
            case Request():
                content = None if step.content is None else _counted(step, stop)
                return self._http.request(step.method, step.url, content=content, **_options(step))
            case Wait(seconds):
                stop.wait(seconds)
                return _go_on(stop)
            case Work(function):
                return function()
            case Together(flows):
                return self._together(flows, stop)
            case Pipelined():
                return self._pipeline(step)

    def _together(self, flows: tuple[Flow[Any], ...], stop: _Stop) -> list[Any]:
        theirs = stop.inner()
        threads = ThreadPoolExecutor(max(1, len(flows)), FLOW_THREADS)
        futures: list[Future[Any]] = []
        try:
            for flow in flows:
                futures.append(threads.submit(self._outcome, flow, theirs))
            return [future.result() for future in futures]
        except BaseException:  # the caller's thread was interrupted, and is about to clean up
            theirs.set()
            wait(futures, _LEAVE_SECONDS)
            raise
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _pipeline(self, step: Pipelined) -> None:
        stop = _Stop()
        under_way: set[Future[Any]] = set()
        with ThreadPoolExecutor(step.width, FLOW_THREADS) as threads:  # whose end waits for all of them
            try:
                for flow in step.flows:
                    if isinstance(flow, Work):
                        flow.function()
                        continue
                    under_way.add(threads.submit(self._run, flow, stop))
                    under_way = _some_done(under_way, block=len(under_way) == step.width)
                while under_way:
                    under_way = _some_done(under_way, block=True)
            except BaseException:
                stop.set()
                raise

    def _outcome(self, flow: Flow[T], stop: _Stop) -> T | Exception:
        try:
            return self._run(flow, stop)
        except Exception as error:
            return error


class AsyncDriver:
    """Runs a flow as a coroutine. Work, and the reading of bodies, is done in a thread. `transport`: as of the other."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._http = httpx.AsyncClient(transport=transport or AsyncNetwork())

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def run(self, flow: Flow[T]) -> T:
        """Run a flow, and return its result. A cancellation too is thrown into the flow, so that it can clean up."""
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
                return await in_thread(function)
            case Together(flows):
                return await asyncio.gather(*map(self._outcome, flows))
            case Pipelined():
                return await self._pipeline(step)

    async def _pipeline(self, step: Pipelined) -> None:
        under_way: set[asyncio.Task[Any]] = set()
        try:
            for flow in step.flows:
                if isinstance(flow, Work):
                    await in_thread(flow.function)
                    continue
                under_way.add(asyncio.create_task(self.run(flow)))
                under_way = await _some_ended(under_way, block=len(under_way) == step.width)
            while under_way:
                under_way = await _some_ended(under_way, block=True)
        except BaseException:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            raise

    async def _outcome(self, flow: Flow[T]) -> T | Exception:
        try:
            return await self.run(flow)
        except Exception as error:
            return error


def _options(step: Request) -> dict[str, Any]:
    timeout = httpx.Timeout(step.timeout, connect=min(step.timeout, CONNECT_SECONDS))
    names = {"sni_hostname": step.server_name} if step.server_name else None
    return {"headers": step.headers, "timeout": timeout, "json": step.json, "extensions": names}


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise _Stopped


def _some_done(futures: set[Future[Any]], *, block: bool) -> set[Future[Any]]:
    """Return the futures that go on; raise what one that is done has failed with. `block`: wait for one."""
    done, others = wait(futures, None if block else 0, FIRST_COMPLETED)
    for future in done:
        future.result()
    return others


async def _some_ended(tasks: set[asyncio.Task[Any]], *, block: bool) -> set[asyncio.Task[Any]]:
    """`_some_done` of tasks."""
    done, others = await asyncio.wait(
        tasks, timeout=None if block else 0, return_when=asyncio.FIRST_COMPLETED
    )
    for task in done:
        task.result()
    return others


def _counted(step: Request, stop: threading.Event) -> Iterator[bytes]:
    count = 0
    for piece in step.content or ():
        _go_on(stop)
        yield piece
        count += len(piece)
        if step.sent:
            step.sent(count)


async def _counted_in_thread(step: Request) -> AsyncIterator[bytes]:
    count = 0
    pieces = iter(step.content or ())
    while (piece := await in_thread(next, pieces, None)) is not None:
        yield piece
        count += len(piece)
        if step.sent:
            step.sent(count)
