# SPDX-License-Identifier: Apache-2.0
"""Hints for names that wrappers of a model have changed: FSDP, torch.compile, DDP, PEFT, or another class's nesting. One
pass over the name, whatever its length."""

from collections import defaultdict
from collections.abc import Iterable

_WRAPPERS = frozenset(
    (
        *("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"),
        *("base_layer", "base_model", "original_module", "modules_to_save", "default"),
        *("model", "language_model"),
    )
)
"""Parts of names that say how a model is nested, not which tensor it is."""
_OTHER_WEIGHTS = frozenset(("original_module", "modules_to_save", "default"))
"""Parts of names that say which of several tensors it is: PEFT keeps one from before and one that is trained."""
_WRAPPED_LENGTH = 256
"""Characters that wrappers may add to a name."""


class Hints:
    """Known names by what is left of them without wrappers. `others`: names that nobody means, whose parts are known."""

    def __init__(self, names: Iterable[str], others: Iterable[str] = ()) -> None:
        self._names: dict[str, set[str]] = defaultdict(set)
        self._depth = self._longest = 0
        for name in names:
            parts = _bare(name.split("."))
            self._names[".".join(parts)].add(name)
            self._depth = max(self._depth, len(parts))
            self._longest = max(self._longest, len(name))
        self._parts = {part for name in (*self._names, *others) for part in name.split(".")}

    def meant(self, name: str) -> str | None:
        """Return the one known name that this one ends with, both without wrappers. What comes before must be in no name
        that is known: `vision_tower.layers.0` does not mean `layers.0`."""
        parts = _bare(name.split("."))
        for first in range(len(parts)):
            rest = parts[first:] if len(parts) - first <= self._depth else []
            if rest and sum(map(len, rest)) <= self._longest:
                known = self._names.get(".".join(rest), set())
                if known:
                    return next(iter(known)) if len(known) == 1 else None
            if parts[first] in self._parts:
                return None
        return None

    def unwrapped(self, name: str) -> str | None:
        """Return the one known name that differs from this one by wrappers alone.

        None of them may keep other weights too.
        """
        parts = name.split(".")
        if len(name) > 2 * self._longest + _WRAPPED_LENGTH or _OTHER_WEIGHTS.intersection(parts):
            return None
        known = self._names.get(".".join(_bare(parts)), set())
        return next(iter(known)) if len(known) == 1 else None


def _bare(parts: list[str]) -> list[str]:
    return [part for part in parts if part not in _WRAPPERS]
