# SPDX-License-Identifier: Apache-2.0
"""Looks whether every tensor of a shadow is finite: what is tried where no prompt can be."""

from collections.abc import Iterable

import torch
from torch import Tensor

from vllm_fp8ext.update.contract.rank_results import CanaryScore
from vllm_fp8ext.update.worker.cooperative_task import Pause

PAUSE_BYTES = 1 << 30
"""Read between two pauses: a pause is a step of all ranks, and a tensor takes a GPU less than a millisecond."""
_E4M3_NAN = 0x7F
"""Both NaNs of the format, but for the sign; it has no infinity."""


def finite_tensors(tensors: Iterable[Tensor], pause: Pause) -> CanaryScore:
    """Return `finite`, and no log-probability; pauses after `PAUSE_BYTES`, and at the end."""
    finite, read = True, 0
    with torch.inference_mode():
        for tensor in tensors:
            finite = finite and _is_finite(tensor)
            read += tensor.nbytes
            if read >= PAUSE_BYTES:
                read = 0
                pause()
    pause()
    return CanaryScore(finite=finite)


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:
        return not bool((tensor.view(torch.uint8) & 0x7F == _E4M3_NAN).any())
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
