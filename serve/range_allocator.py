# SPDX-License-Identifier: Apache-2.0
"""A number of bytes, lent in ranges to those who ask, first come first served.

Who finds no room waits. Whoever comes later is served meanwhile where that makes nobody wait longer who came before: beside
the part of the room that will be free soonest for the first who waits. So neither do small ones wait behind a large one that
leaves them room, nor does a large one wait for ever because small ones take what becomes free.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_fp8ext.errors import UpdateError

PAGE = 4096
"""Bytes to a multiple of which extents begin."""


@dataclass(frozen=True)
class _Waiting:
    size: int
    offset: "asyncio.Future[int]"


class RangeAllocator:
    """`limit` bytes, a multiple of `PAGE`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lent: list[tuple[int, int]] = []
        self._lost: list[tuple[int, int]] = []
        self._waiting: list[_Waiting] = []

    async def take(self, size: int) -> int:
        """Return the offset of a range of `size` bytes. It is the caller's until it is given back, or lost.

        Raises:
            UpdateError: `engine-timeout`: so much will never be free again, for what was lost.
        """
        waiting = _Waiting(size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._serve()
        try:
            return await waiting.offset
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._serve()
            elif not waiting.offset.cancelled() and waiting.offset.exception() is None:
                self.give_back(waiting.offset.result(), size)
            raise

    def give_back(self, offset: int, size: int) -> None:
        """An extent is free again."""
        self._lent.remove((offset, size))
        self._serve()

    def lose(self, offset: int, size: int) -> None:
        """An extent will not be free again."""
        self._lent.remove((offset, size))
        self._lost.append((offset, size))
        self._serve()

    def _serve(self) -> None:
        """Serve all who can be served, and tell those who never can."""
        promised: list[tuple[int, int]] = []
        self._waiting = [waiting for waiting in self._waiting if not waiting.offset.cancelled()]
        for waiting in list(self._waiting):
            offset = self._gap(waiting.size, [*self._lent, *self._lost, *promised])
            if offset is not None:
                self._waiting.remove(waiting)
                self._lent.append((offset, waiting.size))
                waiting.offset.set_result(offset)
            elif self._gap(waiting.size, self._lost) is None:
                self._waiting.remove(waiting)
                message = f"a rank may still read some of the room for uploads: none is left for {waiting.size} bytes"
                waiting.offset.set_exception(UpdateError("engine-timeout", message, status=504))
            elif not promised:
                promised.append((self._soonest(waiting.size), waiting.size))

    def _gap(self, size: int, taken: Iterable[tuple[int, int]]) -> int | None:
        """Offset of the first free extent of this size, where these are taken."""
        start = 0
        for offset, length in [*sorted(taken), (self.limit, 0)]:
            if start + size <= offset:
                return start
            start = max(start, _up(offset + length))
        return None

    def _soonest(self, size: int) -> int:
        """Return the offset of the range, beside what is lost, that is free soonest. The fewest others must be given back for
        it; of such ranges it has the fewest bytes that are free now. There is one."""
        ends = [0, *(_up(offset + length) for offset, length in [*self._lent, *self._lost])]
        starts = [self.limit, *(offset for offset, _ in [*self._lent, *self._lost])]
        offsets = [*ends, *((start - size) // PAGE * PAGE for start in starts)]
        possible = [
            offset
            for offset in offsets
            if 0 <= offset <= self.limit - size and not _overlap(offset, size, self._lost)
        ]
        return min(possible, key=lambda offset: self._wait_for(offset, size))

    def _wait_for(self, offset: int, size: int) -> tuple[int, int, int]:
        overlaps = [_overlap(offset, size, [extent]) for extent in self._lent]
        return sum(map(bool, overlaps)), -sum(overlaps), offset


def _up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE


def _overlap(start: int, size: int, extents: Iterable[tuple[int, int]]) -> int:
    """Bytes of these extents in another one."""
    return sum(max(0, min(start + size, offset + length) - max(start, offset)) for offset, length in extents)
