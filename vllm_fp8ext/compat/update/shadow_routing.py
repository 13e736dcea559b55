# SPDX-License-Identifier: Apache-2.0
"""Runs mixture-of-experts layers of a model that no engine schedules.

`MoERunner.forward` finds its own layer by name in the process-wide forward context, which belongs to the live model, and so
does the context's part in sequence parallelism; `TransformersMoERunner` gets tokens with their experts.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

FEATURE: str = "core"
WHY: str = "Run the experts of a second model: vLLM finds experts by name in the live model's context."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._forward_entry",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._sequence_parallel_context",
    "vllm.model_executor.models.transformers.moe:TransformersMoERunner.forward",
)
USES: dict[str, tuple[str, ...]] = {
    "run the experts of a second model": (
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._forward_impl("
        "hidden_states, router_logits, shared_experts_input, input_ids)",
    ),
    "run the experts of a second model that Transformers defines": (
        "vllm.model_executor.models.transformers.moe:TransformersMoERunner._forward_super("
        "hidden_states, topk_weights)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM can run a second model beside the served one"


def route_alone(model: nn.Module) -> None:
    """Give every mixture-of-experts layer of `model` a forward that runs its own experts."""
    for module in model.modules():
        if isinstance(module, MoERunner):
            module._forward_entry = partial(_forward, module)
            module._sequence_parallel_context = nullcontext
            if hasattr(module, "_moe_state"):
                module.forward = partial(_told, module)


def _told(runner: Any, hidden: Tensor, experts: Tensor, weights: Tensor, **_: Any) -> Any:
    runner._moe_state.topk_ids = experts.to(torch.int32)
    return runner._forward_super(hidden, weights.to(torch.float32))


def _forward(
    runner: MoERunner, hidden: Any, logits: Any, shared: Any, tokens: Any, _name: Any, _unpadded: Any
) -> Any:
    return runner._forward_impl(hidden, logits, shared, tokens)
