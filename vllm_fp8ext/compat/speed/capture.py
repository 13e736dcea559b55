# SPDX-License-Identifier: Apache-2.0
"""Tells whether a CUDA graph takes up what is launched now."""

import torch

FEATURE: str = "core"
WHY: str = "Record nothing into a graph: attention runs both ways."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "`kv_recorder` and `decode_attention` go"


def is_captured() -> bool:
    """Graphs that are broken at attention do not while it runs."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
