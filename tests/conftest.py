# SPDX-License-Identifier: Apache-2.0
"""Leaves out what this machine has no hardware for."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests for GPUs that are not here."""
    if not any(item.get_closest_marker("gpu") or item.get_closest_marker("multigpu") for item in items):
        return
    import torch

    gpus = torch.cuda.device_count()
    needs = [
        (2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0)
        for item in items
    ]
    config.hook.pytest_deselected(
        items=[item for item, need in zip(items, needs, strict=True) if need > gpus]
    )
    items[:] = [item for item, need in zip(items, needs, strict=True) if need <= gpus]
