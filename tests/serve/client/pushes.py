# SPDX-License-Identifier: Apache-2.0
"""What tests of pushes share."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .server import chunk

CHUNK_1 = chunk(1)
COMMIT = "POST /updates/*/commit"


def names(calls: list[str], id: str) -> list[str]:
    return [call.replace(id, "u") for call in calls]


class Sharded(Tensor):
    """Looks like a DTensor."""

    def full_tensor(self) -> Tensor:
        raise AssertionError


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == expected[name].dtype and torch.equal(actual[name], expected[name])
        for name in expected
    )


def load_all(checkpoint: Path) -> dict[str, Tensor]:
    return {name: tensor for file in checkpoint.iterdir() for name, tensor in load_file(file).items()}
