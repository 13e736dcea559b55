# SPDX-License-Identifier: Apache-2.0
"""Runs attention of a model that no engine schedules: plain, causal, over one prompt at a time.

Latent attention expands keys and values, as vLLM does for prompts. vLLM's own `Attention.forward` finds the layer, its KV
cache and its metadata by name in the process-wide forward context, which belongs to the live model.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType

from vllm_fp8ext.compat.update.shadow_recurrence import is_known, recur_plainly
from vllm_fp8ext.layers.latent_attention import split_heads, up_projection

FEATURE: str = "core"
WHY: str = "Try new weights before they are served: vLLM runs one model a process."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.layers.attention:Attention.forward(query, key, value)",
    "vllm.model_executor.layers.attention:MLAAttention.forward(q, kv_c_normed, k_pe)",
)
USES: dict[str, tuple[str, ...]] = {
    "try new weights before they are served": (
        "vllm.model_executor.layers.attention:Attention.sliding_window",
        "vllm.model_executor.layers.attention:Attention.kv_sharing_target_layer_name",
    ),
    "run latent attention of new weights": ("vllm.model_executor.layers.attention:MLAAttention.use_sparse",),
    "know layers that are not plain attention": ("vllm.v1.attention.backend:AttentionType.DECODER",),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM can run a second model beside the served one"

_QUERY_ROWS = 256
"""Queries attended to at once: bounds the scores to heads x 256 x tokens."""


def layers_without_forward(model: nn.Module) -> list[str]:
    """Name kinds of layers of `model` that the shadow can't compute.

    It computes causal attention, over a layer's own K and V or those of an earlier layer, and layers with states that
    `shadow_recurrence` knows.
    """
    return sorted({kind for module in model.modules() if (kind := _beyond(module))})


def _beyond(module: nn.Module) -> str | None:
    if isinstance(module, MLAAttention):
        return _beyond_latent(module)
    if not isinstance(module, Attention):
        unknown = isinstance(module, AttentionLayerBase) and not is_known(module)
        return type(module).__name__ if unknown else None
    if module.attn_type != AttentionType.DECODER:
        return f"{module.attn_type} attention"
    if getattr(module.impl, "alibi_slopes", None) is not None:
        return "ALiBi"
    return None


def _beyond_latent(layer: Any) -> str | None:
    if layer.use_sparse:
        return "sparse latent attention (an indexer)"
    return "latent attention with windows" if layer.sliding_window else None


def attend_plainly(
    model: nn.Module,
    after: Callable[[], None],
    see: Callable[[str, Tensor, Tensor, Tensor], None] | None = None,
    lengths: Sequence[int] | None = None,
) -> None:
    """Give attention layers, and layers with states, a plain forward that ends with `after()`.

    `see(layer, query, key, value)` is told what would be cached, `[tokens, heads, head dimension]` each. `lengths`: of
    prompts that stand one after the other, none of which sees another.
    """

    layers = [module for module in model.modules() if isinstance(module, Attention | MLAAttention)]
    shared = {getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers} - {None}
    kept: dict[str, tuple[Tensor, Tensor]] = {}
    """Keys and values of this pass that other layers read, by layer."""

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.kv_sharing_target_layer_name is not None:
            key, value = kept[self.kv_sharing_target_layer_name]
        elif self.layer_name in shared:
            kept[self.layer_name] = key, value
        heads = (
            query.view(-1, self.num_heads, self.head_size),
            key.view(-1, self.num_kv_heads, self.head_size),
            value.view(-1, self.num_kv_heads, self.head_size_v),
        )
        if see is not None:
            see(self.layer_name, *heads)
        parts = zip(*(part.split(list(lengths or [len(part)])) for part in heads), strict=True)
        out = torch.cat([_attended(self, *part) for part in parts])
        after()
        return out.reshape(out.shape[0], -1)

    def latent_forward(self: Any, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, *_: Any, **__: Any) -> Tensor:
        if see is not None:
            see(self.layer_name, *_cached(self, q, kv_c_normed, k_pe))
        parts = zip(
            *(part.split(list(lengths or [len(part)])) for part in (q, *_expanded(self, kv_c_normed, k_pe))),
            strict=True,
        )
        out = torch.cat([causal_attention(*part, scale=self.scale) for part in parts])
        after()
        return out.reshape(out.shape[0], -1)

    for layer in layers:
        layer.forward = types.MethodType(
            latent_forward if isinstance(layer, MLAAttention) else forward, layer
        )
    recur_plainly(model, after, lengths)


def _expanded(layer: Any, latent_TL: Tensor, rope_T1R: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys `[T, H, P + R]` and values `[T, H, V]` of a latent."""
    heads, width = layer.num_heads, layer.qk_nope_head_dim + layer.v_head_dim
    both = layer.kv_b_proj(latent_TL)[0].view(-1, heads, width)
    keys, values = both.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
    return torch.cat([keys, rope_T1R.expand(-1, heads, -1)], -1), values


def _cached(layer: Any, query_THD: Tensor, latent_TL: Tensor, rope_T1R: Tensor) -> tuple[Tensor, ...]:
    """Return the query in the latent space, and the cached rows, which decoding multiplies.

    They are `[T, H, L + R]` and `[T, 1, L + R]`.

    The cache has one row, which is key and, in its first L columns, value: it is told as both, so that both have one scale.
    """
    keys, _ = split_heads(up_projection(layer.kv_b_proj, query_THD.dtype), layer)
    plain, rope = query_THD.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
    absorbed = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
    row = torch.cat([latent_TL[:, None], rope_T1R.view(len(latent_TL), 1, -1)], -1)
    return torch.cat([absorbed, rope], -1), row, row


def _attended(layer: Any, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> Tensor:
    return causal_attention(
        query_THD,
        key_TGD,
        value_TGD,
        scale=layer.impl.scale,
        window=layer.sliding_window,
        softcap=getattr(layer.impl, "logits_soft_cap", None) or 0.0,
        sinks=getattr(layer.impl, "sinks", None),
    )


def causal_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of T tokens, H query heads over G key heads; returns `[T, H, Dv]` in the dtype of the query.

    `window`: keys that a query sees with itself. `softcap`: scores become `softcap * tanh(scores / softcap)`. `sinks`: per
    head, one more score that takes probability and has no value.
    """
    tokens, heads, _ = query_THD.shape
    if not softcap and sinks is None and (not window or window >= tokens):
        parts = (query_THD, key_TGD, value_TGD)
        if query_THD.device.type == "cpu":
            parts = (query_THD.float(), key_TGD.float(), value_TGD.float())
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1).to(query_THD.dtype)
    repeat = heads // key_TGD.shape[1]
    keys = key_TGD.float().repeat_interleave(repeat, 1).transpose(0, 1)
    values = value_TGD.float().repeat_interleave(repeat, 1).transpose(0, 1)
    positions = torch.arange(tokens, device=query_THD.device)
    pieces = []
    for start in range(0, tokens, _QUERY_ROWS):
        rows = positions[start : start + _QUERY_ROWS]
        scores = query_THD[rows].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = positions[None, :] > rows[:, None]
        if window:
            hidden |= positions[None, :] <= rows[:, None] - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            extra = sinks.float()[:, None, None].expand(heads, rows.shape[0], 1)
            weights = torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        pieces.append((weights @ values).transpose(0, 1))
    return torch.cat(pieces).to(query_THD.dtype)
