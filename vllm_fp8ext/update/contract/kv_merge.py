# SPDX-License-Identifier: Apache-2.0
"""KV-cache numbers of all ranks, or of several commits, merged."""

import math
from collections.abc import Callable, Mapping, Sequence

from vllm_fp8ext.kv_types import Scales

Column = Sequence[float | None]
Part = Mapping[str, Mapping[str, Column]]


def largest(parts: Sequence[Part]) -> Scales:
    """Element by element the largest number that any rank has; NaN and infinity count as the largest."""
    return _by_element(parts, _largest)


def remembered(commits: Sequence[Part]) -> Scales:
    """Element by element the largest finite number of some commits, infinity where there is none: one step that was not
    finite says nothing of the others."""
    return _by_element(commits, lambda column: _largest(list(filter(_finite, column)) or column))


def _by_element(parts: Sequence[Part], choose: Callable[[Column], float]) -> Scales:
    """Layers are those of all parts: a pipeline stage has its own."""
    kinds = dict.fromkeys((layer, kind) for part in parts for layer in part for kind in part[layer])
    merged: Scales = {}
    for name, kind in kinds:
        columns = zip(*(part[name][kind] for part in parts if name in part), strict=True)
        merged.setdefault(name, {})[kind] = list(map(choose, columns))
    return merged


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _largest(column: Column) -> float:
    known = [value for value in column if value is not None]
    return max((math.inf if math.isnan(value) else value for value in known), default=0.0)
