# SPDX-License-Identifier: Apache-2.0
"""What ranks say of their heads, made one."""

import math
from collections.abc import Mapping, Sequence

from vllm_fp8ext.kv.scales import Scales


def largest(parts: Sequence[Mapping[str, Mapping[str, Sequence[float | None]]]]) -> Scales:
    """Element by element the largest number that any rank has; NaN and infinity count as the largest."""
    found: Scales = {}
    for layer, kinds in parts[0].items():
        for kind in kinds:
            columns = zip(*(part[layer][kind] for part in parts), strict=True)
            found.setdefault(layer, {})[kind] = [_largest(column) for column in columns]
    return found


def _largest(column: Sequence[float | None]) -> float:
    known = [value for value in column if value is not None]
    return max((math.inf if math.isnan(value) else value for value in known), default=0.0)
