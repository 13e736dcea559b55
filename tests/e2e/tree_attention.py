# SPDX-License-Identifier: Apache-2.0
"""Attention in place of the kernel that TRL's `AsyncGRPOTrainer` fetches from a hub.

On a GPU the forward pass is vLLM's FlashAttention 3, which has no backward pass; the rest is torch, segment by segment.

Shapes: Q queries, K keys, H heads, G heads of keys, D size of a head.
"""

import itertools
from typing import Any

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q_QHD: Tensor,
    k_KGD: Tensor,
    v_KGD: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest_queries: int,
    longest_keys: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Return the attention of segments whose ends are `queries` and `keys`; causal, aligned at their last tokens.

    Raises:
        NotImplementedError: a window, or all keys for each query.
    """
    if not causal or tuple(window_size) != (-1, -1):
        raise NotImplementedError(f"expected causal attention to all keys, found window {window_size}")
    scale = q_QHD.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if not q_QHD.is_cuda:
        return segments_attention(q_QHD, k_KGD, v_KGD, queries, keys, scale)
    out: Tensor = _Attention.apply(q_QHD, k_KGD, v_KGD, queries, keys, longest_queries, longest_keys, scale)
    return out


def segments_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, scale: float
) -> Tensor:
    """Return the attention of each segment by torch alone."""
    outs, ends = [], list(zip(queries.tolist(), keys.tolist(), strict=True))
    repeats = q.shape[1] // k.shape[1]
    for (q_begin, k_begin), (q_end, k_end) in itertools.pairwise(ends):
        q_HQD = q[q_begin:q_end].transpose(0, 1)
        k_HKD, v_HKD = (x[k_begin:k_end].transpose(0, 1).repeat_interleave(repeats, 0) for x in (k, v))
        scores = (q_HQD @ k_HKD.transpose(1, 2)).float() * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(
            1 + scores.shape[2] - scores.shape[1]
        )
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outs.append((weights.to(v.dtype) @ v_HKD).transpose(0, 1))
    return torch.cat(outs)


class _Attention(torch.autograd.Function):
    """Forward by vLLM's FlashAttention 3, backward through `segments_attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Tensor,
        keys: Tensor,
        longest_queries: int,
        longest_keys: int,
        scale: float,
    ) -> Tensor:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func as flash_attention

        ctx.save_for_backward(q, k, v, queries, keys)
        ctx.scale = scale
        out: Tensor = flash_attention(
            *(q, k, v, int(longest_queries), queries, int(longest_keys)),
            cu_seqlens_k=keys,
            softmax_scale=scale,
            causal=True,
            fa_version=3,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *tensors, queries, keys = ctx.saved_tensors
        with torch.enable_grad():
            q, k, v = (tensor.detach().requires_grad_() for tensor in tensors)
            out = segments_attention(q, k, v, queries, keys, ctx.scale)
            grads = torch.autograd.grad(out, (q, k, v), grad)
        return *grads, None, None, None, None, None
