# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's experts as a trainer holds them."""

from pathlib import Path

import torch

from vllm_fp8ext.bench.fused import stored_fused
from vllm_fp8ext.update.contract.fused import fused_experts
from vllm_fp8ext.update.transports.wire import stored

MIXTURE = Path(__file__).parents[1] / "e2e" / "mixture" / "early"


def test_experts_lie_in_fused_tensors_in_their_order() -> None:
    apart = dict(stored(MIXTURE, "cpu"))
    whole = fused_experts({name: tuple(tensor.shape) for name, tensor in apart.items()})
    tensors = dict(stored_fused(MIXTURE, "cpu"))
    assert whole
    assert whole.keys() <= tensors.keys()
    for name, of in whole.items():
        matrices = tensors.pop(name).flatten(0, 1).chunk(len(of.parts))
        for part, matrix in zip(of.parts, matrices, strict=True):
            assert torch.equal(matrix, apart.pop(part))
    assert tensors.keys() == apart.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in apart.items())
