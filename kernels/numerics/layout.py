# SPDX-License-Identifier: Apache-2.0
"""How weights are cut into blocks. Needs no torch: a client knows it, too."""

BLOCK = 128
"""Rows and columns of a weight block; columns of an activation group."""


def blocks(size: int) -> int:
    """Number of blocks that cover `size` rows or columns."""
    return -(-size // BLOCK)
