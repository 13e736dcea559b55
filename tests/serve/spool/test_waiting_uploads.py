# SPDX-License-Identifier: Apache-2.0
"""Uploads that wait for room, stall, or are cancelled."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.spool import ReceivedBody, Spool

from .bodies import (
    LIMIT,
    PAGE,
    on_disk,
    pages,
    pieces,
    refused,
    settle,
    stalled,
    takes_everything,
)


def test_a_body_beyond_the_room_waits_and_is_not_read_before(spool: Spool) -> None:
    events: list[str] = []

    async def second_body() -> AsyncIterator[bytes]:
        events.append("second is read")
        yield b"y" * 5 * PAGE

    async def second() -> None:
        async with spool.receive(second_body(), 5 * PAGE) as extent:
            assert on_disk(extent) == b"y" * 5 * PAGE

    async def main() -> None:
        async with spool.receive(pages(6), 6 * PAGE) as first:
            waiting = asyncio.create_task(second())
            await settle()
            assert events == []
            assert on_disk(first) == b"x" * 6 * PAGE
        await asyncio.wait_for(waiting, 10)
        assert events == ["second is read"]
        await takes_everything(spool)

    asyncio.run(main())


def test_room_is_given_in_order_of_arrival(spool: Spool) -> None:
    """Small bodies that would fit wait behind a big one that needs all the room: it would starve otherwise."""
    events: list[str] = []

    async def upload(name: str, count: int, until: asyncio.Event) -> None:
        async with spool.receive(pages(count), count * PAGE):
            events.append(name)
            await until.wait()

    async def main() -> None:
        first_done, others_done = asyncio.Event(), asyncio.Event()
        others_done.set()
        tasks = [asyncio.create_task(upload("first", 4, first_done))]
        while not events:
            await asyncio.sleep(0.001)
        for name, count in (("big", 10), ("small 1", 1), ("small 2", 1)):
            await settle()
            tasks.append(asyncio.create_task(upload(name, count, others_done)))
        await settle()
        assert events == ["first"]
        first_done.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert sorted(events) == ["big", "first", "small 1", "small 2"]
        await takes_everything(spool)

    asyncio.run(main())


def test_one_that_stops_waiting_does_not_hold_up_the_next(spool: Spool) -> None:
    async def wait_for_room(count: int) -> None:
        async with spool.receive(pages(count), count * PAGE):
            pass

    async def main() -> None:
        async with spool.receive(pages(4), 4 * PAGE):
            big = asyncio.create_task(wait_for_room(10))
            await settle()
            small = asyncio.create_task(wait_for_room(1))
            await settle()
            assert not small.done()
            big.cancel()
            await asyncio.wait_for(small, 10)
        await takes_everything(spool)

    asyncio.run(main())


@given(
    st.lists(
        st.tuples(st.integers(0, LIMIT), st.sampled_from(("good", "short", "failing", "cancelled"))),
        max_size=15,
    )
)
@settings(max_examples=40)
def test_extents_never_overlap_and_all_room_comes_back(
    tmp_path_factory: pytest.TempPathFactory, uploads: list[tuple[int, str]]
) -> None:
    spool = Spool(str(tmp_path_factory.mktemp("spool")), LIMIT)
    held: list[tuple[int, int]] = []

    async def upload(number: int, size: int, fate: str) -> None:
        content = bytes([number + 1]) * size
        body = pieces(content[: size // 2], b"" if fate == "short" else content[size // 2 :])
        async with spool.receive(body, size) as extent:
            own = extent.offset, extent.offset + size
            assert 0 <= own[0] <= own[1] <= spool.limit
            assert not size or all(own[1] <= start or stop <= own[0] for start, stop in held if start < stop)
            held.append(own)
            try:
                if fate == "cancelled":
                    await asyncio.Event().wait()
                await settle()
                assert bytes(extent.content) == on_disk(extent) == content
                if fate == "failing":
                    raise RuntimeError("staging failed")
            finally:
                held.remove(own)

    async def main() -> None:
        tasks = [asyncio.create_task(upload(number, *each)) for number, each in enumerate(uploads)]
        cancelled = [task for task, (_, fate) in zip(tasks, uploads, strict=True) if fate == "cancelled"]
        while cancelled:
            await settle()
            cancelled.pop().cancel()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        for (size, fate), outcome in zip(uploads, outcomes, strict=True):
            expected = {"good": type(None), "short": UpdateError, "failing": RuntimeError}
            kind = expected.get(fate, asyncio.CancelledError)
            assert isinstance(outcome, kind) or (fate == "short" and not size), (fate, outcome)
        await takes_everything(spool)

    asyncio.run(main())
    spool.close()


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_an_upload_that_stalls_gives_its_room_back(tmp_path: Path, content: bytes) -> None:
    spool = Spool(str(tmp_path), LIMIT, idle_seconds=0.2)

    async def main() -> None:
        error = await refused(spool, stalled(content), LIMIT)
        assert (error.kind, error.status) == ("upload-stalled", 408)
        assert f"after {len(content)} of {LIMIT} bytes" in str(error)
        await takes_everything(spool)

    asyncio.run(main())
    spool.close()


def test_waiting_for_room_and_staging_are_not_stalling(tmp_path: Path) -> None:
    """Only the client is held to the time between two pieces: what it waits for is not its fault."""
    spool = Spool(str(tmp_path), LIMIT, idle_seconds=0.2)

    async def second() -> None:
        async with spool.receive(pages(10), LIMIT):
            pass

    async def main() -> None:
        async with spool.receive(pages(10), LIMIT):
            waiting = asyncio.create_task(second())
            await asyncio.sleep(0.1)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 10)

    asyncio.run(main())
    spool.close()


@pytest.mark.parametrize("moment", ["waiting", "reading", "staging"])
def test_a_cancelled_upload_leaves_nothing(spool: Spool, moment: str) -> None:
    async def upload() -> None:
        body = stalled(b"x") if moment == "reading" else pages(8)
        async with spool.receive(body, 8 * PAGE):
            await asyncio.Event().wait()

    async def cancel() -> None:
        task = asyncio.create_task(upload())
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> None:
        if moment == "waiting":
            async with spool.receive(pages(5), 5 * PAGE):
                await cancel()
        else:
            await cancel()
        await takes_everything(spool)

    asyncio.run(main())


def test_while_the_folder_gives_room_others_end_and_can_be_cancelled(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    allocate = os.posix_fallocate

    def slowly(*arguments: int) -> None:
        go_on.wait(60)
        allocate(*arguments)

    async def upload(until: asyncio.Event) -> None:
        async with spool.receive(pages(2), 2 * PAGE):
            await until.wait()

    async def main() -> None:
        done = asyncio.Event()
        first = asyncio.create_task(upload(done))
        cancelled = asyncio.create_task(upload(asyncio.Event()))
        while spool._backed != [(0, 4 * PAGE)]:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(os, "posix_fallocate", slowly)
        second = asyncio.create_task(upload(done))
        await settle()
        done.set()
        cancelled.cancel()
        await asyncio.wait_for(first, 5)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(cancelled, 5)
        assert not second.done()
        go_on.set()
        await asyncio.wait_for(second, 10)
        await takes_everything(spool)

    asyncio.run(main())


def test_what_a_silent_rank_may_still_read_is_not_given_to_another(spool: Spool) -> None:
    """Its bytes would be staged as those of the upload that was given up."""

    async def main() -> None:
        async def give_up() -> ReceivedBody:
            with contextlib.suppress(UpdateError):
                async with spool.receive(pages(4), 4 * PAGE) as extent:
                    raise UpdateError("engine-timeout", "a rank is silent", status=504)
            return extent

        held = await give_up()
        kept = bytes(held.content)
        async with asyncio.timeout(10), spool.receive(pages(6), 6 * PAGE) as other:
            assert other.offset >= held.offset + held.length
            assert bytes(held.content) == kept
        async with asyncio.timeout(10):
            with pytest.raises(UpdateError, match="none is left") as refused:
                async with spool.receive(pages(LIMIT // PAGE), LIMIT):
                    pass
            assert (refused.value.kind, refused.value.status) == ("engine-timeout", 504)
            async with spool.receive(pages(1), PAGE):
                pass

    asyncio.run(main())
