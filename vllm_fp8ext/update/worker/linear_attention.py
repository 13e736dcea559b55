# SPDX-License-Identifier: Apache-2.0
"""Linear attention over whole prompts, in plain torch and fp32: what the shadow's layers with states compute by.

A state `S` (`[H, K, V]`) is zero before a prompt. Each token forgets some of it and adds to it; the output reads it. Tokens
are taken `CHUNK` at a time: inside a chunk, everything is a product of matrices, and no data is looked at on the host, so
that a CUDA graph can be captured.

Suffixes: T tokens, H heads (of values), G groups of heads that share keys, K and V sizes of a head's key and value, C
channels, W width of the convolution, N chunks, L tokens of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens taken at once."""


def causal_conv(
    inputs_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
) -> Tensor:
    """Convolve each channel with its last W tokens; returns `[T, C]` in the dtype of `inputs_TC`.

    `activation`: `silu` (or `swish`), or None.

    Raises:
        ValueError: another activation.
    """
    if activation not in ("silu", "swish", None):
        raise ValueError(f"expected the activation silu, swish or none, found {activation}")
    width = weight_CW.shape[1]
    padded = F.pad(inputs_TC.float().t()[None], (width - 1, 0))
    bias = None if bias_C is None else bias_C.float()
    out = F.conv1d(padded, weight_CW.float()[:, None], bias, groups=weight_CW.shape[0])[0].t()
    return (F.silu(out) if activation else out).to(inputs_TC.dtype)


def gated_delta_rule(
    query_TGK: Tensor, key_TGK: Tensor, value_THV: Tensor, decay_TH: Tensor, rate_TH: Tensor
) -> Tensor:
    """Gated delta rule: `S = exp(decay) S; S += key (rate (value - S^T key))^T; output = S^T query / sqrt(K)`.

    Keys and queries are scaled to length 1 first. `decay_TH`: logarithms, not positive. Returns `[T, H, V]` in fp32.
    """
    repeat = value_THV.shape[1] // key_TGK.shape[1]
    query, key = (_unit(part.float()) for part in (query_TGK, key_TGK))
    query = query * query.shape[-1] ** -0.5
    query, key = (part.repeat_interleave(repeat, 1) for part in (query, key))
    query, key, value, decay, rate = (
        _chunks(part) for part in (query, key, value_THV.float(), decay_TH.float(), rate_TH.float())
    )
    total_NHL, inner_NHLL = _decays(decay)
    # what a token adds depends on what the ones before it in its chunk have added: (1 + A) U = rate (value - old)
    coupling = (rate[..., None] * (key @ key.transpose(-1, -2)) * inner_NHLL).tril(-1)
    solve = _inverse(coupling)
    added = solve @ (rate[..., None] * value)
    read = solve @ (rate[..., None] * total_NHL.exp()[..., None] * key)
    return _unchunked(_passed(query, key, added, total_NHL, inner_NHLL, read), value_THV.shape[0])


def selective_scan(
    inputs_THV: Tensor,
    step_TH: Tensor,
    rate_H: Tensor,
    key_TGK: Tensor,
    query_TGK: Tensor,
    skip_H: Tensor | None,
) -> Tensor:
    """Mamba2's scan: `S = exp(step rate) S + step key inputs^T; output = S^T query + skip inputs`.

    `step_TH`: positive. `rate_H`: not positive. `skip_H`: may be None. Returns `[T, H, V]` in fp32.
    """
    repeat = inputs_THV.shape[1] // key_TGK.shape[1]
    inputs, step = inputs_THV.float(), step_TH.float()
    query, key = (part.float().repeat_interleave(repeat, 1) for part in (query_TGK, key_TGK))
    query, key, added, decay = (
        _chunks(part) for part in (query, key, step[..., None] * inputs, step * rate_H.float())
    )
    total_NHL, inner_NHLL = _decays(decay)
    out = _unchunked(_passed(query, key, added, total_NHL, inner_NHLL, None), inputs.shape[0])
    return out if skip_H is None else out + skip_H.float()[:, None] * inputs


def _passed(
    query_NHLK: Tensor,
    key_NHLK: Tensor,
    added_NHLV: Tensor,
    total_NHL: Tensor,
    inner_NHLL: Tensor,
    read_NHLK: Tensor | None,
) -> Tensor:
    """Pass the state from chunk to chunk. `read_NHLK`: what of the state is taken from `added` (the delta rule), or None."""
    chunks, heads, _, size = key_NHLK.shape
    state = key_NHLK.new_zeros(heads, size, added_NHLV.shape[-1])
    scores = (query_NHLK @ key_NHLK.transpose(-1, -2)) * inner_NHLL
    decayed_query = query_NHLK * total_NHL.exp()[..., None]
    end_NH1 = total_NHL[..., -1:]
    kept_key = key_NHLK * (end_NH1 - total_NHL).exp()[..., None]
    outputs = []
    for chunk in range(chunks):
        added = added_NHLV[chunk]
        if read_NHLK is not None:
            added = added - read_NHLK[chunk] @ state
        outputs.append(decayed_query[chunk] @ state + scores[chunk] @ added)
        state = end_NH1[chunk].exp()[..., None] * state + kept_key[chunk].transpose(-1, -2) @ added
    return torch.stack(outputs)


def _unit(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1, those near zero to less, as vLLM's kernels do."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def _decays(decay_NHL: Tensor) -> tuple[Tensor, Tensor]:
    """Sum logarithms of decays from a chunk's begin; and from each of its tokens to each later one, as factors."""
    total = decay_NHL.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=total.device).triu(1)
    return total, between.masked_fill(later, -torch.inf).exp()


def _inverse(strict_NHLL: Tensor) -> Tensor:
    """Invert `1 + A` of a strictly lower triangular `A`, all chunks at once."""
    inverse = -strict_NHLL
    for row in range(1, CHUNK):
        above = inverse[..., :row, :row].clone()
        inverse[..., row, :row] += (inverse[..., row, None, :row].clone() @ above)[..., 0, :]
    return inverse + torch.eye(CHUNK, device=inverse.device)


def _chunks(tokens_TH: Tensor) -> Tensor:
    """`[T, H, ...]` as `[N, H, L, ...]`; tokens of zeros fill the last chunk, which add nothing."""
    missing = -tokens_TH.shape[0] % CHUNK
    whole = F.pad(tokens_TH, (0, 0) * (tokens_TH.dim() - 1) + (0, missing))
    return whole.unflatten(0, (-1, CHUNK)).transpose(1, 2)


def _unchunked(out_NHLV: Tensor, tokens: int) -> Tensor:
    return out_NHLV.transpose(1, 2).flatten(0, 1)[:tokens]
