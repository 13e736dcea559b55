# SPDX-License-Identifier: Apache-2.0
"""Runs layers with states of a model that no engine schedules.

They are Gated DeltaNet, Mamba2 and short convolutions.

vLLM's own forwards find the layer, its states and its metadata by name in the process-wide forward context, which belongs to
the live model. Here, the states of each prompt begin at zero, and nothing is kept behind a pass.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from vllm_fp8ext.update.worker.linear_attention import causal_conv, gated_delta_rule, selective_scan

FEATURE: str = "core"
WHY: str = "Try new weights before they are served: vLLM runs one model a process."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.forward("
    "hidden_states)",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.forward(hidden_states, mup_vector)",
    "vllm.model_executor.layers.mamba.short_conv:ShortConv.forward(hidden_states, output)",
)
USES: dict[str, tuple[str, ...]] = {
    "try new weights of linear attention before they are served": (
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:"
        "QwenGatedDeltaNetAttention.prepare_gdn_attention_core_inputs(mixed_qkvz, mixed_ba, num_tokens)",
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:"
        "QwenGatedDeltaNetAttention.rearrange_mixed_qkv(mixed_qkv)",
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:"
        "QwenGatedDeltaNetAttention._output_projection(core_attn_out, z)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM can run a second model beside the served one"

Forward = Callable[..., Any]


def recur_plainly(model: nn.Module, after: Callable[[], None], lengths: Sequence[int] | None = None) -> None:
    """Give every layer of `FORWARDS` in `model` a plain forward that ends with `after()`.

    `lengths`: of prompts that stand one after the other, each of which begins with empty states.
    """
    for module in model.modules():
        for kind, forward in FORWARDS.items():
            if isinstance(module, kind):
                module.forward = types.MethodType(_followed(forward, after, lengths), module)


def is_known(module: nn.Module) -> bool:
    """Tell whether the shadow has a forward for this layer with states."""
    return isinstance(module, tuple(FORWARDS))


def _followed(forward: Forward, after: Callable[[], None], lengths: Sequence[int] | None) -> Forward:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, lengths, *args, **kwargs)
        after()
        return out

    return run


def _by_prompt(lengths: Sequence[int] | None, run: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    """Run each prompt alone, on its rows of all parts; returns the rows of all prompts."""
    rows = list(lengths or [len(parts[0])])
    return torch.cat([run(*split) for split in zip(*(part.split(rows) for part in parts), strict=True)])


def _conv(layer: nn.Module, inputs_TC: Tensor, activation: str | None) -> Tensor:
    weight: Any = layer.weight
    return causal_conv(inputs_TC, weight.view(weight.shape[0], -1), getattr(layer, "bias", None), activation)


def _gated_delta_net(layer: Any, lengths: Sequence[int] | None, hidden_states: Tensor) -> Tensor:
    qkvz, _ = layer.in_proj_qkvz(hidden_states)
    ba, _ = layer.in_proj_ba(hidden_states)
    mixed, gate, b, a = layer.prepare_gdn_attention_core_inputs(qkvz, ba, len(hidden_states))
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())

    def run(mixed: Tensor, decay: Tensor, b: Tensor) -> Tensor:
        parts = layer.rearrange_mixed_qkv(_conv(layer.conv1d, mixed, layer.activation))
        query, key, value = (part[0] for part in parts)
        return gated_delta_rule(query, key, value, decay, b.float().sigmoid())

    out = _by_prompt(lengths, run, mixed, decay, b).to(hidden_states.dtype)
    projected: Tensor = layer._output_projection(out, gate)
    return projected


def _mamba2(
    layer: Any, lengths: Sequence[int] | None, hidden_states: Tensor, mup_vector: Tensor | None = None
) -> Tensor:
    projected, _ = layer.in_proj(hidden_states)
    if mup_vector is not None:
        projected = projected * mup_vector
    sizes = [layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size]
    gate, mixed, step = projected.split(sizes, -1)

    def run(mixed: Tensor, step: Tensor) -> Tensor:
        inputs, key, query = layer.split_hidden_states_B_C_fn(_conv(layer.conv1d, mixed, layer.activation))
        step = F.softplus(step.float() + layer.dt_bias.float())
        key, query = (part.unflatten(-1, (-1, layer.ssm_state_size)) for part in (key, query))
        inputs = inputs.unflatten(-1, (-1, layer.head_dim))
        return selective_scan(inputs, step, layer.A, key, query, layer.D)

    out = _by_prompt(lengths, run, mixed, step).flatten(1).to(hidden_states.dtype)
    result: Tensor = layer.out_proj(layer.norm(out, gate))[0]
    return result


def _short_conv(layer: Any, lengths: Sequence[int] | None, hidden_states: Tensor, output: Tensor) -> None:
    before, behind, inputs = layer.in_proj(hidden_states)[0].chunk(3, -1)

    def run(inputs: Tensor) -> Tensor:
        return _conv(layer.conv, inputs, None)

    output[: len(hidden_states)] = layer.out_proj(behind * _by_prompt(lengths, run, before * inputs))[0]


FORWARDS: dict[type[nn.Module], Forward] = {
    QwenGatedDeltaNetAttention: _gated_delta_net,
    MambaMixer2: _mamba2,
    ShortConv: _short_conv,
}
"""Forwards by class. They take the layer, lengths of prompts, and what vLLM's forward takes."""
