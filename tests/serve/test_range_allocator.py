# SPDX-License-Identifier: Apache-2.0
"""Who waits for room, and for how long."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.range_allocator import PAGE, RangeAllocator


class Asking:
    """Calls of `RangeAllocator.take`, which run until they wait; sizes and offsets in pages."""

    def __init__(self, room: RangeAllocator) -> None:
        self._room = room
        self.calls: list[asyncio.Task[int]] = []

    async def take(self, size: int) -> "asyncio.Task[int]":
        self.calls.append(asyncio.ensure_future(self._room.take(size * PAGE)))
        await settle()
        return self.calls[-1]

    async def give_back(self, offset: int, size: int) -> None:
        self._room.give_back(offset * PAGE, size * PAGE)
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def offset(call: "asyncio.Task[int]") -> int | None:
    """In pages; None while it waits."""
    return call.result() // PAGE if call.done() else None


def played(story: Callable[[Asking], Awaitable[None]], pages: int = 10) -> None:
    async def main() -> None:
        asking = Asking(RangeAllocator(pages * PAGE))
        try:
            async with asyncio.timeout(20):
                await story(asking)
        finally:
            for call in asking.calls:
                call.cancel()

    asyncio.run(main())


def test_a_small_one_does_not_wait_behind_a_large_one_that_leaves_it_room() -> None:
    async def story(asking: Asking) -> None:
        assert offset(await asking.take(6)) == 0
        large = await asking.take(8)
        assert offset(large) is None  # it gets the first eight, since what is free now is a part of them
        small = await asking.take(2)
        assert offset(small) == 8
        await asking.give_back(0, 6)
        assert offset(large) == 0

    played(story)


def test_a_large_one_does_not_wait_for_ever_because_of_small_ones() -> None:
    async def story(asking: Asking) -> None:
        first, second = await asking.take(5), await asking.take(5)
        large = await asking.take(10)
        small = [await asking.take(1) for _ in range(20)]
        await asking.give_back(offset(first) or 0, 5)
        assert [offset(call) for call in small] == [None] * 20
        await asking.give_back(offset(second) or 0, 5)
        assert offset(large) == 0
        assert [offset(call) for call in small] == [None] * 20
        await asking.give_back(0, 10)
        assert [offset(call) for call in small[:11]] == [*range(10), None]

    played(story)


def test_equal_ones_are_served_in_the_order_in_which_they_came() -> None:
    async def story(asking: Asking) -> None:
        await asking.take(10)
        calls = [await asking.take(4) for _ in range(4)]
        await asking.give_back(0, 10)
        assert [offset(call) for call in calls] == [0, 4, None, None]
        await asking.give_back(4, 4)
        assert [offset(call) for call in calls] == [0, 4, 4, None]

    played(story)


def test_one_that_gives_up_makes_way() -> None:
    async def story(asking: Asking) -> None:
        await asking.take(5)
        large, small = await asking.take(10), await asking.take(2)
        assert (offset(large), offset(small)) == (None, None)
        large.cancel()
        await settle()
        assert offset(small) == 5

    played(story)


def test_what_is_given_to_one_that_has_just_given_up_comes_back() -> None:
    async def story(asking: Asking) -> None:
        await asking.take(10)
        waiting = await asking.take(10)
        asking._room.give_back(0, 10 * PAGE)
        waiting.cancel()
        await settle()
        assert waiting.cancelled()
        assert offset(await asking.take(10)) == 0

    played(story)


def test_one_that_can_never_be_served_is_told() -> None:
    async def story(asking: Asking) -> None:
        await asking.take(3)
        large, small = await asking.take(8), await asking.take(7)
        asking._room.lose(0, 3 * PAGE)
        await settle()
        with pytest.raises(UpdateError) as caught:
            await large
        assert (caught.value.kind, caught.value.status) == ("engine-timeout", 504)
        assert offset(small) == 3

    played(story)


ACTIONS = st.lists(st.tuples(st.sampled_from("tttgcl"), st.integers(0, 10)), max_size=60)


@given(ACTIONS)
def test_extents_are_apart_and_everybody_is_served_in_the_end(actions: list[tuple[str, int]]) -> None:
    async def story(asking: Asking) -> None:
        sizes: dict[Any, int] = {}
        held: list[Any] = []
        lost: list[tuple[int, int]] = []

        def collect() -> None:
            for call in [call for call in sizes if call.done() and call not in held]:
                if call.cancelled() or call.exception():
                    del sizes[call]
                else:
                    held.append(call)
            extents = sorted([*lost, *((offset(call) or 0, sizes[call]) for call in held if sizes[call])])
            for (start, size), (following, _) in pairwise([*extents, (10, 0)]):
                assert 0 <= start <= start + size <= following

        for action, number in actions:
            if action == "t":
                sizes[await asking.take(number)] = number
            elif action == "c" and sizes:
                call = list(sizes)[number % len(sizes)]
                if call not in held:
                    call.cancel()
                    await settle()
            elif held:
                call = held.pop(number % len(held))
                place = offset(call) or 0, sizes.pop(call)
                if action == "g" or sum(size for _, size in lost) > 3:
                    await asking.give_back(*place)
                else:
                    lost.append(place)
                    asking._room.lose(place[0] * PAGE, place[1] * PAGE)
                    await settle()
            collect()
        while sizes:
            collect()
            waiting = [call for call in sizes if call not in held]
            assert held or not waiting, "somebody waits for room that is free"
            while held:
                call = held.pop()
                await asking.give_back(offset(call) or 0, sizes.pop(call))
            if waiting:
                assert waiting[0].done(), "the first who waits is served once all that was lent is free"

    played(story)
