# SPDX-License-Identifier: Apache-2.0
"""Counts what was compiled in this process.

So a server can show that nothing is compiled under traffic.
"""

import collections

counts: collections.Counter[str] = collections.Counter()
"""Kernels by compiler: `nvrtc`, `triton`."""


def note(compiler: str) -> None:
    """One more kernel was compiled."""
    counts[compiler] += 1
