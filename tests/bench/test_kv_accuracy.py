# SPDX-License-Identifier: Apache-2.0
"""The pieces of the benchmark of accuracy; its servers are not started."""

import math

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from vllm_fp8ext.bench import kv_accuracy
from vllm_fp8ext.checkpoints import LATE, problems
from vllm_fp8ext.kv_trainer import cached_kv


@torch.no_grad()
def predicted(model: Qwen3ForCausalLM, rows: Tensor) -> Tensor:
    return model(rows[:, :-1], use_cache=False).logits.float().log_softmax(-1)


@pytest.mark.parametrize("factor", [1.0, 100.0, 0.01])
def test_the_function_stays_while_k_and_v_grow(factor: float):
    model = Qwen3ForCausalLM.from_pretrained(LATE, dtype=torch.float32)
    rows = kv_accuracy.encoded(problems(8))
    before, cached = predicted(model, rows), cached_kv(model, rows.tolist())
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(
        {name: tensor.float() for name, tensor in kv_accuracy.grown(weights, factor).items()}
    )
    comparison = kv_accuracy.compared(before, predicted(model, rows), rows)
    assert abs(comparison["mean_kl"]) < 1e-6
    assert comparison["accuracy"] == comparison["accuracy_bf16"] == 1
    for index, (parts, others) in enumerate(zip(cached, cached_kv(model, rows.tolist()), strict=True)):
        grown = [
            (other.abs().amax() / part.abs().amax() / factor).item()
            for part, other in zip(parts, others, strict=True)
        ]
        assert grown[1] == pytest.approx(1, rel=0.02)
        if index == kv_accuracy.OUTLIER_LAYER:
            assert grown[0] > 5
        else:
            assert grown[0] == pytest.approx(1, rel=0.02)


def test_what_is_compared():
    rows = kv_accuracy.encoded(problems(2))
    expected = torch.full((2, rows.shape[1] - 1, 128), -20.0)
    expected[..., 3], expected[..., 4] = math.log(0.75), math.log(0.25)
    result = expected.clone()
    result[..., 3], result[..., 4] = math.log(0.5), math.log(0.5)
    told = kv_accuracy.compared(expected, result, rows)
    assert told["mean_kl"] == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-4)
    share = [(rows[:, 1:] == token).float().mean().item() for token in (3, 4)]
    assert told["logprob_error"] == pytest.approx(share[0] * math.log(1.5) + share[1] * math.log(2), rel=1e-4)
    assert told["accuracy_bf16"] == pytest.approx((rows[:, 8:] == 3).float().mean().item())


def test_saturated_is_that_of_the_worst_layer():
    fits, half = torch.full((4, 2, 8), 448.0), torch.tensor([448.0, 449.0]).repeat(4, 2, 4)
    scales = {layer: {kind: [1.0] for kind in "qkv"} for layer in "ab"}
    assert kv_accuracy.saturated([(fits, fits), (fits, half)], scales) == 0.5
    assert kv_accuracy.saturated([(fits, fits), (half, half)], {**scales, "b": {"k": [2.0], "v": [2.0]}}) == 0
