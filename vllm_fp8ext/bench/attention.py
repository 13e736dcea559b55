# SPDX-License-Identifier: Apache-2.0
"""Attention in a decode step, by length of the context: FlashAttention 3, as vLLM bundles it, over BF16 and FP8 K and V, and
our own kernel over both. In a step that also reads a prompt, ours has the requests that decode, FlashAttention the prompt.
Layers of other models have heads of other sizes, sliding windows, soft caps or sinks."""

from typing import NamedTuple

import torch
from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func

from vllm_fp8ext.bench.report import Calls, Report
from vllm_fp8ext.kernels.attention.decode_attention import (
    AttentionKind,
    DecodeAttention,
    DecodeStep,
    decode_attention_reference,
)
from vllm_fp8ext.kernels.attention.kv_cache import amax_by_head, next_scales, quantize
from vllm_fp8ext.kernels.testing import kernel_cases, kernel_timing

DECODES = (
    *((128, 1536), (128, 8192), (128, 20480), (256, 1536), (32, 1536)),
    *((8, 1536), (8, 8192), (8, 20480), (1, 1536)),
)
"""Requests, and tokens in the context of each."""
MIXED = ((1024, 1024), (256, 1536), (32, 1536), (8, 1536), (4, 20480))
"""Likewise, of those that decode beside a prompt."""
PROMPT = 512
"""Its tokens."""
TOLERANCE = 0.1
"""Bound for ‖FP8 - BF16‖ / ‖BF16‖ of the outputs: queries, K and V each have an error of 2.7 %."""
BOUND = 4e-3
"""‖ours - exact‖ / ‖exact‖ of the same codes: to round the result to BF16 is 1.7e-3 of it."""
CHECKED = 4
"""Requests that are compared with what is exact."""


class AttentionLayer(NamedTuple):
    """Attention of one layer of a model."""

    heads: int
    kv_heads: int
    kind: AttentionKind


QWEN3_8B = AttentionLayer(kernel_cases.Q_HEADS, kernel_cases.KV_HEADS, AttentionKind(kernel_cases.HEAD_DIM))
LAYERS = {
    "Llama-3.2-1B": AttentionLayer(32, 8, AttentionKind(64)),
    "Qwen2.5-0.5B": AttentionLayer(14, 2, AttentionKind(64)),
    "gpt-oss, window": AttentionLayer(64, 8, AttentionKind(64, window=128, sinks=True)),
    "gpt-oss": AttentionLayer(64, 8, AttentionKind(64, sinks=True)),
    "Phi-3-mini": AttentionLayer(32, 32, AttentionKind(96, window=2047)),
    "Gemma-2-9B": AttentionLayer(16, 8, AttentionKind(256, soft_cap=50.0)),
    "Gemma-3-12B": AttentionLayer(16, 8, AttentionKind(256)),
    "Gemma-3-12B, window": AttentionLayer(16, 8, AttentionKind(256, window=1024)),
    "Qwen3.5-27B": AttentionLayer(24, 4, AttentionKind(256)),
    "Qwen3.5-35B-A3B": AttentionLayer(16, 2, AttentionKind(256)),
}
LAYER_REQUESTS, LAYER_CONTEXT = (8, 32, 128), 1536


def attention(report: Report) -> None:
    """All of them."""
    for requests, context in DECODES:
        if report.late(f"attention_decode {requests}x{context}"):
            return
        decode(report, requests, context)
        torch.cuda.empty_cache()
    for requests, context in MIXED:
        if report.late(f"attention_mixed {requests}x{context}"):
            return
        mixed(report, requests, context)
        torch.cuda.empty_cache()


def layers(report: Report) -> None:
    """Layers of other models than Qwen3."""
    for name, layer in LAYERS.items():
        for requests in LAYER_REQUESTS:
            if report.late(f"attention_layers {name}"):
                return
            decode(report, requests, LAYER_CONTEXT, layer, name)
            torch.cuda.empty_cache()


def mixed(report: Report, requests: int, context: int) -> None:
    """Requests that decode, and a prompt behind them."""
    noise = torch.Generator("cuda").manual_seed(0)
    each = -(-max(context, PROMPT) // kernel_cases.KV_BLOCK)
    shape = ((requests + 1) * each, kernel_cases.KV_HEADS, kernel_cases.KV_BLOCK, 2 * kernel_cases.HEAD_DIM)
    codes = torch.randint(0, 0x60, shape, dtype=torch.uint8, device="cuda", generator=noise)
    codes = codes.view(torch.float8_e4m3fn)
    table = torch.randperm(len(codes), device="cuda", generator=noise).view(requests + 1, each).int()
    tokens = requests + PROMPT
    query = torch.randn(tokens, kernel_cases.Q_HEADS, kernel_cases.HEAD_DIM, device="cuda", generator=noise)
    query = query.to(torch.float8_e4m3fn)
    starts = torch.tensor([*range(requests + 1), tokens], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([*[context] * requests, PROMPT], dtype=torch.int32, device="cuda")
    scale = torch.full((1,), 0.05, device="cuda")
    softmax_scale = kernel_cases.HEAD_DIM**-0.5
    outs = {
        name: torch.empty(query.shape, dtype=torch.bfloat16, device="cuda") for name in ("fp8", "blockfp8")
    }

    def flash(name: str, first: int) -> None:
        batch = starts[first:], lengths[first:], table[first:], (PROMPT, max(context, PROMPT))
        _flash(outs[name], QWEN3_8B, query, codes, *batch, scales=(scale,) * 3)

    kernel = DecodeAttention(kernel_cases.Q_HEADS, kernel_cases.KV_HEADS, requests, query.device)
    last = (context - 1) // kernel_cases.KV_BLOCK
    newest = codes[table[:requests, last].long(), :, (context - 1) % kernel_cases.KV_BLOCK].float() * scale
    key, value = (part.bfloat16().contiguous() for part in newest.split(kernel_cases.HEAD_DIM, -1))
    step = DecodeStep(
        query[:requests], key, value, codes, table, lengths[:requests], None, (scale,) * 3, softmax_scale
    )

    def apart(_: int) -> None:
        flash("blockfp8", requests)
        kernel(step, outs["blockfp8"][:requests])

    calls: Calls = {"fp8": lambda _: flash("fp8", 0), "blockfp8": apart}
    timings = kernel_timing.measure(calls, dict.fromkeys(calls, 1))
    right = _is_right(outs["blockfp8"], step, QWEN3_8B)
    alike, theirs = (outs[name][requests:].float() for name in ("blockfp8", "fp8"))
    prompts = bool((alike - theirs).norm() <= 2 * BOUND * theirs.norm())
    moved = dict.fromkeys(calls, codes.numel())
    where = (context, kernel_cases.Q_HEADS, kernel_cases.KV_HEADS, kernel_cases.HEAD_DIM)
    report.add(
        "attention_mixed",
        where,
        requests,
        timings,
        moved,
        baseline="fp8",
        exact={"blockfp8": right and prompts},
    )


def decode(
    report: Report, requests: int, context: int, layer: AttentionLayer = QWEN3_8B, name: str | None = None
) -> None:
    """One layer, each request's blocks anywhere in the cache.

    `name`: what the case is told as; None for Qwen3-8B, told by its shape.
    """
    heads, kv_heads, kind = layer
    size = kind.head_size
    blocks = requests * context // kernel_cases.KV_BLOCK
    noise = torch.Generator("cuda").manual_seed(0)
    shape = (blocks, kv_heads, kernel_cases.KV_BLOCK, 2 * size)
    plain = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=noise)
    query = torch.randn(requests, heads, size, dtype=torch.bfloat16, device="cuda", generator=noise)
    sinks = None
    if kind.sinks:
        sinks = torch.randn(heads, dtype=torch.bfloat16, device="cuda", generator=noise)
    one = torch.ones(1, device="cuda")
    scale_q = next_scales(amax_by_head(query, 1), one)
    scale_kv = next_scales(plain.abs().amax().float()[None], one)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part, target in zip(plain.split(4096), codes.split(4096), strict=True):
        rows = part.reshape(-1, 1, 2 * size)
        target.copy_(quantize(rows, scale_kv).view(part.shape))
    order = torch.randperm(blocks, device="cuda", generator=noise)
    table = order.view(requests, -1).int()
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    outs = {variant: torch.empty_like(query) for variant in ("bf16", "blockfp8_bf16", "fp8", "blockfp8")}
    codes_q = quantize(query, scale_q)
    made = heads, kv_heads, requests, query.device
    kernel, plain_kernel = (DecodeAttention(*made, cached.dtype, kind=kind) for cached in (codes, plain))
    newest = plain[table[:, -1], :, -1]  # cached already
    key, value = (part.contiguous() for part in newest.split(size, -1))
    slots = table[:, -1].long() * kernel_cases.KV_BLOCK + kernel_cases.KV_BLOCK - 1
    scales = (scale_q, scale_kv, scale_kv)
    batch = starts, lengths, table, (1, context)
    step = DecodeStep(codes_q, key, value, codes, table, lengths, slots, scales, size**-0.5, sinks)
    plain_step = step._replace(query_RHD=query, cache=plain, scales=(one,) * 3)
    calls: Calls = {
        "bf16": lambda _: _flash(outs["bf16"], layer, query, plain, *batch, sinks=sinks),
        "blockfp8_bf16": lambda _: plain_kernel(plain_step, outs["blockfp8_bf16"]),
        "fp8": lambda _: _flash(outs["fp8"], layer, codes_q, codes, *batch, scales=scales, sinks=sinks),
        "blockfp8": lambda _: kernel(step, outs["blockfp8"]),
    }
    timings = kernel_timing.measure(calls, dict.fromkeys(calls, 1))
    expected, output = outs["bf16"].float(), outs["fp8"].float()
    near = bool((output - expected).norm() <= TOLERANCE * expected.norm())
    ours = {"blockfp8": step, "blockfp8_bf16": plain_step}
    right = {"fp8": near} | {variant: _is_right(outs[variant], one, layer) for variant, one in ours.items()}
    read = plain.numel() * min(kind.window or context, context) // context
    moved = {variant: read * (2 if variant.endswith("bf16") else 1) for variant in calls}
    where = (context, name) if name else (context, heads, kv_heads, size)
    kernel_name = "attention_layers" if name else "attention_decode"
    report.add(kernel_name, where, requests, timings, moved, exact=right)


def _flash(
    out: Tensor,
    layer: AttentionLayer,
    query_THD: Tensor,
    cache: Tensor,
    starts: Tensor,
    lengths_R: Tensor,
    table_RB: Tensor,
    longest: tuple[int, int],
    *,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
) -> None:
    """FlashAttention 3 of requests whose tokens begin at `starts`; `longest`: most new tokens of one, and tokens in a
    context. `scales`: of Q, K and V in FP8."""
    kind = layer.kind
    key, value = cache.transpose(1, 2).split(kind.head_size, -1)
    descales = {}
    if scales is not None:
        names = ("q_descale", "k_descale", "v_descale")
        by_head = (scale.expand(len(lengths_R), layer.kv_heads) for scale in scales)
        descales = dict(zip(names, by_head, strict=True))
    flash_attn_varlen_func(
        *(query_THD, key, value),
        max_seqlen_q=longest[0],
        cu_seqlens_q=starts,
        max_seqlen_k=longest[1],
        seqused_k=lengths_R,
        softmax_scale=kind.head_size**-0.5,
        causal=True,
        window_size=[kind.window - 1, 0] if kind.window else [-1, -1],
        softcap=kind.soft_cap,
        s_aux=sinks,
        block_table=table_RB,
        out=out,
        fa_version=3,
        **descales,
    )


def _is_right(out: Tensor, step: DecodeStep, layer: AttentionLayer) -> bool:
    """Compare our outputs of a step's first requests with the exact ones."""
    checked = slice(min(CHECKED, len(step.lengths_R)))
    shown = (step.query_RHD[checked], step.cache, step.table_RB[checked], step.lengths_R[checked])
    exact = decode_attention_reference(*shown, step.scales, step.softmax_scale, layer.kind, step.sinks_H)
    return bool((out[checked] - exact).norm() <= BOUND * exact.norm())
