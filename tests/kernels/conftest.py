# SPDX-License-Identifier: Apache-2.0
"""Where Triton's kernels are tested."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """The GPU if there is one, else the CPU with Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
