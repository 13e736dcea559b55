# SPDX-License-Identifier: Apache-2.0
"""Whether a CUDA graph takes up what is launched now."""

import torch


def is_captured() -> bool:
    """Graphs that are broken at attention do not while it runs."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
