# SPDX-License-Identifier: Apache-2.0
"""Models with parts that no update would reach."""

import pytest
from torch import nn

from vllm_fp8ext.compat.update.model import require_no_copies
from vllm_fp8ext.errors import ConfigError


class FourierRotaryEmbedding(nn.Module):
    """By the name of vLLM's, which makes its table at the first step."""


class Runner(nn.Module):
    def __init__(self, *, joins: bool) -> None:
        super().__init__()
        self._fse_fuse_gate = joins


def test_what_copies_weights_at_its_first_step_is_refused() -> None:
    require_no_copies(nn.Sequential(nn.Linear(2, 2), Runner(joins=False)))
    with pytest.raises(ConfigError, match="FourierRotaryEmbedding") as refused:
        require_no_copies(nn.Sequential(nn.Sequential(FourierRotaryEmbedding())))
    assert "MoERunner" not in str(refused.value)
    with pytest.raises(ConfigError, match="MoERunner"):
        require_no_copies(nn.Sequential(Runner(joins=True)))
