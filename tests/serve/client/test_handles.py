# SPDX-License-Identifier: Apache-2.0
"""Tensors that are handed over where they are: what is refused before a GPU is asked."""

import numpy as np
import pytest
import torch

from vllm_fp8ext.serve.client.handles import batches

from .conftest import Caller
from .server import Server


@pytest.mark.parametrize(
    ("tensor", "found"), [(torch.ones(2), "cpu"), (np.ones(2, np.float32), "ndarray|cpu"), ("text", "str")]
)
def test_only_tensors_on_a_gpu(tensor, found: str) -> None:
    with pytest.raises(ValueError, match=f"tensor w: expected a torch tensor on a GPU, found ({found})"):
        list(batches([("w", tensor)], 100))


def test_nothing_is_left_open(caller: Caller, server: Server) -> None:
    with pytest.raises(ValueError, match="expected a torch tensor on a GPU"):
        caller(server.url, "push", {"w": torch.ones(2)}, transport="ipc")
    assert server.states == ["abandoned"]


def test_a_transport_that_is_none(caller: Caller, server: Server) -> None:
    with pytest.raises(ValueError, match="transport: expected http, ipc, nccl, found 'pigeon'"):
        caller(server.url, "push", {"w": torch.ones(2)}, transport="pigeon")
    assert server.calls == []
