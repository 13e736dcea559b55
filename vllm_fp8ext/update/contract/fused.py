# SPDX-License-Identifier: Apache-2.0
"""Experts that come fused, as trainers hold them: gate and up of all experts of a layer in one tensor, their down in another.

Each matrix of an expert lies in one run of bytes of such a tensor, so that it is taken as the matrices that it is made of.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ExpertLayout = Literal["out_in", "in_out"]
"""How fused experts lie. `out_in`: `[experts, out, in]`, as transformers holds nearly all of them. `in_out`:
`[experts, in, out]`, as it holds those of gpt-oss and Llama 4."""
TAKEN_LAYOUT: ExpertLayout = "out_in"
"""The layout in which each matrix lies in one run of bytes."""

TRANSPOSED = "transposed, send tensor.transpose(1, 2).contiguous(): the rows of a matrix must lie together"

_MATRIX = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight")
_ORDER = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 0, "w2": 0}
_FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_FUSED |= {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}


def is_fused(name: str) -> bool:
    """Tell whether experts come fused under this name."""
    _, experts, last = name.rpartition(".experts.")
    return bool(experts) and last in _FUSED.values()


@dataclass(frozen=True, slots=True)
class Fused:
    """One tensor of all experts of a layer: `[experts, 2I, K]`, each gate above its up, or `[experts, K, I]`. `parts`: the
    names of its matrices, all of one shape, in the order in which they lie in it."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]

    def layout_problem(self, layout: ExpertLayout | None) -> dict[str, str] | None:
        """Describe what is wrong with a tensor of this `layout`, or return None.

        A shape that is the same both ways tells nothing: the client's `layout` must.
        """
        _, rows, columns = self.shape
        if layout == TAKEN_LAYOUT or (layout is None and rows != columns):
            return None
        detail = (
            TRANSPOSED
            if layout
            else f"its shape is the same both ways: say expert_layout, or if {TRANSPOSED}"
        )
        return {
            "kind": "wrong-layout",
            "expected": TAKEN_LAYOUT,
            "found": layout or "not told",
            "detail": detail,
        }


def stacked_problem(
    expected: tuple[int, ...], sent: tuple[int, ...], own: ExpertLayout, told: ExpertLayout | None
) -> dict[str, str] | None:
    """Describe what is wrong with experts that the checkpoint has fused, or return None.

    `expected`: the shape that they have there, in the layout `own`; `sent`: that of what is sent, the same or its last two
    dimensions in the other order, in the layout `told`, where the client tells.
    """
    other: ExpertLayout = "in_out" if own == "out_in" else "out_in"
    square = expected[1] == expected[2]
    lies = own if square or sent == expected else other
    if told == lies or (told is None and not square):
        return None
    detail = f"its shape is the same both ways: say expert_layout, and send it as {own}"
    return {
        "kind": "wrong-layout",
        "expected": lies,
        "found": told or "not told",
        "detail": detail if square else f"its shape is that of {lies}",
    }


def fused_experts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Fused]:
    """Return the fused tensors that may come, by name, of tensors with these shapes. Their names end with
    `.experts.gate_up_proj` and `.experts.down_proj`."""
    members: dict[str, dict[int, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for name in shapes:
        match = _MATRIX.fullmatch(name)
        if match and match["matrix"] in _FUSED:
            whole = f"{match['experts']}.{_FUSED[match['matrix']]}"
            members[whole][int(match["expert"])].append((_ORDER[match["matrix"]], name))
    fused = {}
    for whole, experts in members.items():
        parts = tuple(name for expert in sorted(experts) for _, name in sorted(experts[expert]))
        each, shape = len(parts) // len(experts), shapes[parts[0]]
        alike = len(shape) == 2 and all(shapes[part] == shape for part in parts)
        if alike and set(experts) == set(range(len(experts))):
            fused[whole] = Fused((len(experts), each * shape[0], shape[1]), parts)
    return fused


def taken_apart(tensors: Iterable[list[Any]], fused: Mapping[str, Fused]) -> list[list[Any]]:
    """Split every fused tensor into its matrices. `tensors`: `[name, shape, dtype, start, bytes]` each."""
    matrices = []
    for tensor in tensors:
        name, shape, dtype, start, size = tensor
        parts = fused[name].parts if name in fused else ()
        if not parts:
            matrices.append(tensor)
            continue
        experts, rows, columns = shape
        each, matrix = size // len(parts), [experts * rows // len(parts), columns]
        matrices += [[part, matrix, dtype, start + number * each, each] for number, part in enumerate(parts)]
    return matrices
