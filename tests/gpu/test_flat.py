# SPDX-License-Identifier: Apache-2.0
"""A trainer's parameters on a GPU, in few buffers: as many handles."""

import gc

import pytest
import torch
from torch import nn

from vllm_fp8ext.serve.client import flatten
from vllm_fp8ext.serve.client.transports.ipc.handles import handles

pytestmark = pytest.mark.gpu


def test_a_model_in_one_buffer_has_one_handle() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # large parts that other tests have left would hold several of these
    layers = [nn.Linear(2048, 3072, device="cuda", dtype=torch.bfloat16) for _ in range(20)]
    model = nn.ModuleList(layers)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(handles(list(model.state_dict().items()), 0).allocations) >= len(layers)
    flatten(model)
    told = handles(list(model.state_dict().items()), 0)
    assert len(told.allocations) == 1
    assert len(told.tensors) == len(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
