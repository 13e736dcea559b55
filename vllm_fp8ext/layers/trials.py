# SPDX-License-Identifier: Apache-2.0
"""Tries kernels that are compiled on the machine that they run on: the compiler may be missing or too old, or the driver.

Replaces nothing.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.quantized import Quantized, empty
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, blocks

logger = logging.getLogger("vllm.fp8ext")

SHAPE = 4096, 4096
"""Rows and columns of weights that every kernel takes."""


def operands(m: int, n: int, k: int) -> tuple[Quantized, Tensor, Tensor]:
    """Make activations `[m, k]`, codes `[n, k]` and their block scales on the current GPU.

    Values are any.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    codes_NK = torch.empty(n, k, dtype=FP8_DTYPE, device=device)
    scales_NbKb = torch.empty(blocks(n), blocks(k), dtype=torch.float32, device=device)
    return empty(m, k, device), codes_NK, scales_NbKb


@torch.inference_mode()
def runs(name: str, multiply: Callable[[], object]) -> bool:
    """Tell whether `multiply` ran once; a warning says why not.

    `multiply`: ends when the GPU has.
    """
    try:
        multiply()
    except Exception as error:  # whatever a compiler or a driver that is missing or too old comes to
        logger.warning("blockfp8: %s does not run here, the next best kernels do: %s", name, error)
        return False
    return True
