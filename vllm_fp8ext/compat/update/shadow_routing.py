# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers of a model that no engine schedules.

Replaces, on the layers of a twin, the operator through which `MoERunner.forward` finds its own layer by name in the
process-wide forward context, which belongs to the live model, and the context's part in sequence parallelism; and likewise
that of `TransformersMoERunner`, whose tokens come with their experts. Can go once vLLM can run a second model beside the
served one.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner


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
