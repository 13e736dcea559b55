# SPDX-License-Identifier: Apache-2.0
"""Leaves out what this machine has no hardware for, and interprets Triton's kernels where there is no GPU."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

BESIDE = Path(sys.prefix) / "interpreter"
"""Where Triton may lie for CPUs: out of sight of vLLM, which would import it without any use."""


def _interpret_triton() -> None:
    """Before anything imports Triton, which reads the variable when its functions are declared."""
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is None and BESIDE.is_dir():
        sys.path.append(str(BESIDE))


# vLLM would report each engine that a test starts
os.environ["VLLM_NO_USAGE_STATS"] = "1"
if torch.cuda.device_count() == 0:
    _interpret_triton()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests for GPUs that are not here."""
    gpus = torch.cuda.device_count()
    needs = [
        (2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0)
        for item in items
    ]
    config.hook.pytest_deselected(
        items=[item for item, need in zip(items, needs, strict=True) if need > gpus]
    )
    items[:] = [item for item, need in zip(items, needs, strict=True) if need <= gpus]
