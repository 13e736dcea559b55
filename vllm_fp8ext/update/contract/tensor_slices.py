# SPDX-License-Identifier: Apache-2.0
"""Slices of checkpoint tensors, which may come instead of whole ones: `NAME[0:256,128:512]`, a start and a stop for each
dimension of the tensor. Imports neither torch nor vLLM."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop in each dimension of a tensor."""

_EXTENT = r"(?:0|[1-9][0-9]{0,14}):(?:0|[1-9][0-9]{0,14})"
_SLICED = re.compile(rf"(?P<tensor>.+)\[(?P<box>{_EXTENT}(?:,{_EXTENT}){{0,7}})\]", re.DOTALL)


class TensorSlice(NamedTuple):
    """A box of a checkpoint tensor."""

    tensor: str
    box: Box

    @property
    def name(self) -> str:
        """Name under which the slice travels."""
        return slice_name(self.tensor, self.box)


def slice_name(tensor: str, box: Iterable[Sequence[int]]) -> str:
    """Return the name of a slice of `tensor`. `box`: start and stop in each of its dimensions."""
    return f"{tensor}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def parsed_slice(name: str) -> TensorSlice | None:
    """Return the slice that has this name; None where it is not the name of one."""
    return _parsed(name) if name.endswith("]") else None


@lru_cache(maxsize=1 << 16)
def _parsed(name: str) -> TensorSlice | None:
    match = _SLICED.fullmatch(name)
    if match is None:
        return None
    extents = (extent.split(":") for extent in match["box"].split(","))
    return TensorSlice(match["tensor"], tuple((int(start), int(stop)) for start, stop in extents))


def tensor_of(name: str) -> str:
    """Return the name of the tensor that this names a slice of, or the name."""
    part = parsed_slice(name)
    return part.tensor if part else name


def boxes_of(names: Iterable[str]) -> dict[str, list[Box]]:
    """Return the boxes of those names that are of slices, by tensor."""
    boxes: dict[str, list[Box]] = {}
    for name in names:
        part = parsed_slice(name)
        if part is not None:
            boxes.setdefault(part.tensor, []).append(part.box)
    return boxes


def extents(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box of what two boxes of one tensor share; None where that is nothing."""
    shared = []
    for (start, stop), (first, last) in zip(one, other, strict=True):
        begin, end = max(start, first), min(stop, last)
        if begin >= end:
            return None
        shared.append((begin, end))
    return tuple(shared)


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    product = 1
    for start, stop in box:
        product *= stop - start
    return product


def covers(boxes: Iterable[Box], wanted: Box) -> bool:
    """Tell whether boxes that share nothing hold all of another box."""
    shared = (intersection(box, wanted) for box in boxes)
    return sum(volume(box) for box in shared if box is not None) == volume(wanted)


def overlapping(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Return names that have elements in common with others, by name the other one: slices with slices of the same tensor, or
    with all of it. Equal names are none: they are found otherwise."""
    shared: dict[str, str] = {}
    theirs: dict[str, list[tuple[str, Box | None]]] = {}
    for other in others:
        part = parsed_slice(other)
        theirs.setdefault(part.tensor if part else other, []).append((other, part.box if part else None))
    for name in names:
        part = parsed_slice(name)
        for other, box in theirs.get(part.tensor if part else name, ()):
            if other != name and _share(part.box if part else None, box):
                shared[name] = other
                break
    return shared


def _share(one: Box | None, other: Box | None) -> bool:
    """Tell whether two boxes of one tensor have elements in common; None is all of it."""
    if one is None or other is None:
        return True
    return len(one) == len(other) and intersection(one, other) is not None


def slices_to_send(tensor: str, shape: Sequence[int], sources: Iterable[Box]) -> list[str]:
    """Return the names of slices that bring these boxes of a tensor once; its own name where they are all of it.

    Boxes that overlap without being equal come as the box around them.
    """
    boxes = list(dict.fromkeys(sources))
    while (pair := _overlap(boxes)) is not None:
        one, other = pair
        around = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
        boxes = [*(box for box in boxes if box not in pair), around]
    whole = tuple((0, size) for size in shape)
    return [tensor if box == whole else slice_name(tensor, box) for box in sorted(boxes)]


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    for index, one in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if intersection(one, other) is not None:
                return one, other
    return None


def by_tensor(boxes: Iterable[Mapping[str, Sequence[Box]]]) -> dict[str, list[Box]]:
    """Join boxes by tensor."""
    joined: dict[str, list[Box]] = {}
    for each in boxes:
        for tensor, theirs in each.items():
            joined.setdefault(tensor, []).extend(theirs)
    return joined
