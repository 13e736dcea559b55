# SPDX-License-Identifier: Apache-2.0
"""Multimodal rotary embedding (MRoPE): which of a token's three positions turns which columns."""

from typing import NamedTuple


class PositionSections(NamedTuple):
    """Columns of half a head that each of a token's three positions turns: time, height and width.

    Text has three equal positions.
    """

    time: int
    height: int
    width: int
    interleaved: bool
    """Positions change from column to column, as in Qwen3-VL. Qwen2.5-VL has three sections."""

    def axes(self) -> list[int]:
        """Return the index of the position of each column of half a head."""
        if not self.interleaved:
            return [0] * self.time + [1] * self.height + [2] * self.width
        ends = (0, 3 * self.height, 3 * self.width)
        columns = range(self.time + self.height + self.width)
        return [column % 3 if column < ends[column % 3] else 0 for column in columns]
