# SPDX-License-Identifier: Apache-2.0
"""torchvision for engines that read images, where it lies beside the environment (`make test` puts it there)."""

import importlib.util
import os
import sys
from pathlib import Path

BESIDE = Path(sys.prefix) / "vision"
HELPER = Path(__file__).parents[1] / "helpers" / "vision"
"""Has a `sitecustomize.py`, which lets it be imported."""


def has_torchvision() -> bool:
    """Tell whether engines started with `with_vision` have it."""
    return BESIDE.is_dir() or importlib.util.find_spec("torchvision") is not None


def with_vision(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment with torchvision, for a program that is executed: a forked one has read its modules."""
    if not BESIDE.is_dir():
        return environment
    paths = [str(HELPER), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
