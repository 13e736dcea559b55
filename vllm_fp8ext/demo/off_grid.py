# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that runs of reinforcement learning begin with: `EARLY`, off the grid of E4M3.

`EARLY` keeps 3 mantissa bits, as E4M3 does. With scales that are powers of two its weights are codes, which no step of an
optimizer changes that is shorter than half the way to the next. The server goes on with the old policy, and the mismatch is
what the trainer has learned. With other scales many weights lie alike between codes, and a step reaches the codes in part.
Weights of a training lie anywhere between codes, which follow them on average.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_fp8ext.checkpoints import EARLY

MANTISSA_BITS = 3
"""Explicit mantissa bits that matrices of `EARLY` have."""
_WEIGHTS = "model.safetensors"


def write_start(folder: Path) -> Path:
    """Copy `EARLY` into a folder, with matrices off the grid. The same bytes each time."""
    shutil.copytree(EARLY, folder)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: off_grid(weight, generator) if weight.ndim > 1 else weight
        for name, weight in sorted(load_file(EARLY / _WEIGHTS).items())
    }
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    return folder


def off_grid(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return weights between half a step below and half a step above these, evenly spread.

    Args:
        weight: of `MANTISSA_BITS` explicit mantissa bits, of any floating dtype and shape.
    """
    values = weight.float()
    _, exponent = torch.frexp(values)
    step = torch.ldexp(torch.ones_like(values), exponent - 1 - MANTISSA_BITS)
    shift = torch.rand(values.shape, generator=generator) - 0.5
    return torch.where(values == 0, values, values + shift * step).to(weight.dtype)
