# SPDX-License-Identifier: Apache-2.0
"""Which layers are taken for routers, and keep their dtype."""

import pytest
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, ReplicatedLinear

from vllm_fp8ext.layers.quantization import _routes


@pytest.mark.parametrize(
    ("kind", "prefix", "routes"),
    [
        (GateLinear, "model.layers.0.mlp.anything", True),
        (ReplicatedLinear, "model.layers.0.mlp.gate", True),
        (ReplicatedLinear, "model.layers.0.mlp.shared_expert_gate", True),
        (ReplicatedLinear, "model.layers.0.mlp.text_experts_gate", True),
        (ReplicatedLinear, "model.layers.0.mlp.router", True),
        (ReplicatedLinear, "model.layers.0.mlp.gate.wg", True),
        (ReplicatedLinear, "model.layers.0.mlp.router.layer", True),
        (ReplicatedLinear, "model.layers.0.mlp.q_a_proj", False),
        (ReplicatedLinear, "model.layers.0.per_layer_input_gate", False),
        (ColumnParallelLinear, "model.layers.0.mlp.gate", False),
    ],
)
def test_routers_are_known_by_what_they_are(kind: type[LinearBase], prefix: str, routes: bool) -> None:
    """Models build them in both ways; of a layer only its kind counts, and its name."""
    assert _routes(kind.__new__(kind), prefix) is routes
