# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token of each request over a paged cache (`decode_attention.cu`).

The token joins the cache, FP8 or BF16; K and V are read once, at memory speed.

Written in CUDA C++: with a few query heads to a KV head a tensor core's tile is all but empty, and what counts is that
bytes never stop coming. That takes copies that run ahead of a warp without its registers, and fragments that are loaded as
the cache lies there, without a transpose of V; Triton offers neither.

Shape suffixes: R requests, H query heads, G KV heads, D head dimension, B blocks of a request.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_fp8ext.kernels.attention.decode_attention_configs import AttentionTileConfig, choose, padded
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK, FP8_DTYPE, ScaleFormat
from vllm_fp8ext.kernels.runtime import cuda_kernel, nvrtc

_SOURCE = Path(__file__).with_suffix(".cu")
HEAD_SIZES = (64, 96, 128, 256)
"""Dimensions of a head that the kernel takes."""
TILE = 16
"""Tokens of a tile; blocks of the cache hold a multiple of them."""
DTYPES = (FP8_DTYPE, torch.bfloat16)
"""Dtypes of caches."""
MOST_GROUP = 16
"""Query heads of one KV head that the kernel takes."""


_OPTIONS = "PIf"
"""`Options` of the source, as `struct` names it: address of sinks, tokens of the window, soft cap."""
_OUT = "PQPPQI"
"""`Out` of the source, as `struct` names it: address and stride of values, then of codes, of scales, their stride, whether
scales are powers of two."""
_ATTEND = ("P", "Q", "PPQQP", "PPQIIII", "P", "I", "P", "P", "P", "I", "f", _OUT, "P", "P", "I", _OPTIONS)
_COMBINE = ("P", "P", "P", "I", "P", "I", _OUT, "I", "I", _OPTIONS)
"""Arguments of the kernels."""


@dataclass(frozen=True)
class AttentionKind:
    """Attention of a layer: dimensions of a head, and what not every layer has."""

    head_size: int = 128
    window: int | None = None
    """Tokens that one attends to, itself among them: a sliding window. None: all of its context."""
    soft_cap: float = 0
    """Scores become `soft_cap * tanh(score / soft_cap)`; 0: they stay."""
    sinks: bool = False
    """Each query head has one score more, whose weight adds nothing."""


class DecodeStep(NamedTuple):
    """One layer's part of a step in which every request has one new token."""

    query_RHD: Tensor
    """As the cache, E4M3 or BF16."""
    key_RGD: Tensor
    value_RGD: Tensor
    """BF16, of the new tokens."""
    cache: Tensor
    """E4M3 (bytes will do) or BF16, `[blocks, G, block tokens, 2 * D]`.

    The first three dimensions may lie in any order; each token's K comes before its V.
    """
    table_RB: Tensor
    """int32 blocks of each request."""
    lengths_R: Tensor
    """int32 tokens of each, the new one among them."""
    slots_R: Tensor | None
    """int64 place of each new token in the cache, `block * block tokens + token`; below 0, it is not cached. None: a kernel
    ahead of this one has cached them all, and what else the step brings."""
    scales: tuple[Tensor, Tensor, Tensor]
    """fp32 of Q, K and V, one or one for each KV head; ones for BF16."""
    softmax_scale: float
    sinks_H: Tensor | None = None
    """BF16 scores of sinks, as those of tokens are behind the softmax's scale."""


class DecodeAttention:
    """The kernel for layers of one shape and one cache dtype on one device.

    It has room for the parts of up to `requests` requests. Calls must be of one stream and one thread at a time: they share
    that room.

    Raises:
        ValueError: a shape, or a number of requests, that the kernel does not take.
        CudaError: there is no GPU, or no compiler.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        requests: int,
        device: torch.device,
        dtype: torch.dtype = FP8_DTYPE,
        config: AttentionTileConfig | None = None,
        kind: AttentionKind = AttentionKind(),
    ) -> None:
        if kind.head_size not in HEAD_SIZES:
            raise ValueError(f"expected heads of {HEAD_SIZES}, found {kind.head_size}")
        if kind.window is not None and not 0 < kind.window < 1 << 31:
            raise ValueError(f"expected a window of at least one token, found {kind.window}")
        if kv_heads < 1 or heads % kv_heads or heads // kv_heads > MOST_GROUP:
            raise ValueError(
                f"expected 1 to {MOST_GROUP} query heads to a KV head, found {heads} and {kv_heads}"
            )
        if dtype not in DTYPES:
            raise ValueError(f"expected a cache in {' or '.join(map(str, DTYPES))}, found {dtype}")
        self.heads, self.kv_heads, self.requests, self.dtype = heads, kv_heads, requests, dtype
        group, size = heads // kv_heads, kind.head_size
        self.kind = kind
        self.config = config = config or choose(kv_heads, requests, dtype, size, group)
        code = machine_code(heads, kv_heads, dtype, config, kind)
        attend, combine = (
            cuda_kernel.Kernel(code, name, config.warps * 32, 1)
            for name in ("decode_attention", "combine_attention")
        )
        self._held: tuple[object, ...] | None = None
        self._attend, self._combine = attend.launcher(_ATTEND), combine.launcher(_COMBINE)
        across = kv_heads // config.together
        self._shared = config.shared_bytes(requests, dtype, size)
        resident = attend.resident_blocks(self._shared)
        if not resident:
            raise ValueError(f"expected fewer requests, found {requests}: they take {self._shared} bytes")
        self._blocks = max(1, resident // across) * across
        self.shares = self._blocks // across * config.shares
        slots = self.shares + requests
        self._parts = torch.empty(slots, heads, padded(size), dtype=torch.float32, device=device)
        self._sums = torch.empty(slots, heads, 2, dtype=torch.float32, device=device)

    @property
    def quantizes(self) -> bool:
        """Outputs may be quantized: a warp has all that share a scale, parts of a head, or two heads of one KV head."""
        size = self.kind.head_size
        return size % BLOCK == 0 or (size * 2 == BLOCK and self.heads // self.kv_heads % 2 == 0)

    def __call__(self, step: DecodeStep, out: Tensor | Quantized, scale_format: ScaleFormat = "fp32") -> None:
        """Write `softmax(query @ K.T * softmax_scale) @ V` of each request into `out`.

        That is zero where a request has no tokens. Each new token's K and V go into the cache, quantized for FP8 as vLLM does
        it. Another request's context may have that token too, if it completes a block.

        `out`: BF16 `[R, H, D]`; or `[R, H * D]` quantized, as `reference.quantize_activation` does it in this format of the
        scales, of which tokens are adjacent.
        """
        self._check(step, out)
        requests, cache, size = step.lengths_R.shape[0], step.cache, self.dtype.itemsize
        block_bytes, head_bytes, token_bytes, _ = (stride * size for stride in cache.stride())
        fresh = (
            *(step.key_RGD.data_ptr(), step.value_RGD.data_ptr()),
            *(step.key_RGD.stride(0), step.value_RGD.stride(0)),
            0 if step.slots_R is None else step.slots_R.data_ptr(),
        )
        paged = (
            *(cache.data_ptr(), step.table_RB.data_ptr(), step.table_RB.stride(0)),
            *(block_bytes, token_bytes, head_bytes, cache.shape[2]),
        )
        q, k, v = (scale.data_ptr() for scale in step.scales)
        scale_stride = int(step.scales[0].numel() > 1)
        to = _out(out, scale_format)
        sinks = 0 if step.sinks_H is None else step.sinks_H.data_ptr()
        options = sinks, self.kind.window or 0, self.kind.soft_cap
        parts, sums, lengths = self._parts.data_ptr(), self._sums.data_ptr(), step.lengths_R.data_ptr()
        query, query_bytes = step.query_RHD.data_ptr(), step.query_RHD.stride(0) * size
        stream = torch.cuda.current_stream(step.query_RHD.device).cuda_stream
        self._attend(
            *(self._blocks, self._shared, stream),
            (
                *(query, query_bytes, *fresh, *paged, lengths, requests, q, k, v, scale_stride),
                *(step.softmax_scale, *to, parts, sums, self.shares, *options),
            ),
            early=step.slots_R is not None,
        )
        spread, size, warps = self._spread(requests), padded(self.kind.head_size), self.config.warps
        blocks, heads_in_block = -(-self.heads * size // BLOCK), max(1, BLOCK // size)
        self._combine(
            -(-requests * blocks * spread // warps),
            128 + warps * (512 + 8 * heads_in_block) + 4 * (requests + 1),
            stream,
            (parts, sums, lengths, requests, v, scale_stride, *to, self.shares, spread, *options),
            early=True,
        )

    def _spread(self, requests: int) -> int:
        """Warps that add up the parts of a block of columns: more where few requests have many parts each."""
        most = self.config.warps & -self.config.warps
        pieces = self.shares // requests // 4
        return min(most, 1 << max(0, pieces.bit_length() - 1)) if pieces else 1

    def _holds(self, cache: Tensor) -> bool:
        layout = cache.dtype, cache.shape, cache.stride(), cache.data_ptr() % 16
        if layout != self._held:
            if not self._can_hold(cache):
                return False
            self._held = layout  # those of an engine's layers are alike
        return True

    def _can_hold(self, cache: Tensor) -> bool:
        _, heads, tokens, both = cache.shape
        is_bytes = self.dtype.itemsize == cache.element_size() == 1
        places = zip(cache.shape[:3], cache.stride()[:3], strict=True)
        strides = [stride * cache.element_size() for size, stride in places if size > 1]
        placed = (
            all(stride % 16 == 0 and stride < 1 << 32 for stride in strides) and cache.data_ptr() % 16 == 0
        )
        shaped = (heads, both) == (self.kv_heads, 2 * self.kind.head_size) and tokens % TILE == 0
        return shaped and (is_bytes or cache.dtype == self.dtype) and cache.stride(3) == 1 and placed

    def _check(self, step: DecodeStep, out: Tensor | Quantized) -> None:
        query_RHD, key_RGD, value_RGD, cache, table_RB, lengths_R, slots_R, scales, _, sinks_H = step
        requests, size = lengths_R.shape[0], self.kind.head_size
        by_query = (requests, self.heads, size)
        by_key = (requests, self.kv_heads, size)
        problems = []
        if not 0 < requests <= self.requests:
            problems.append(f"1 to {self.requests} requests, found {requests}")
        if query_RHD.dtype != self.dtype or query_RHD.shape != by_query:
            problems.append(f"queries {by_query} in {self.dtype}")
        if isinstance(out, Quantized):
            flat = (requests, self.heads * size)
            blocks = (requests, -(-flat[1] // BLOCK))
            if not self.quantizes:
                problems.append(f"BF16 outputs of {self.heads} heads of {size}, {self.kv_heads} of K and V")
            placed = out.codes.is_contiguous() and out.codes.data_ptr() % 16 == 0
            if (out.codes.dtype, out.codes.shape) != (FP8_DTYPE, flat) or not placed:
                problems.append(f"codes {flat} in {FP8_DTYPE}, contiguous, at a multiple of 16 bytes")
            adjacent = requests == 1 or out.scales.stride(0) == 1
            if (out.scales.dtype, out.scales.shape) != (torch.float32, blocks) or not adjacent:
                problems.append(f"fp32 scales of outputs {blocks}, requests adjacent")
        elif out.dtype != torch.bfloat16 or out.shape != by_query:
            problems.append(f"BF16 outputs {by_query}")
        if (key_RGD.dtype, value_RGD.dtype) != (torch.bfloat16,) * 2 or not (
            key_RGD.shape == value_RGD.shape == by_key
        ):
            problems.append(f"BF16 keys and values {by_key}")
        if not self._holds(cache):
            shape = f"[blocks, {self.kv_heads}, a multiple of {TILE}, {2 * size}]"
            problems.append(f"a cache {shape} in {self.dtype}, each token's heads at a multiple of 16 bytes")
        well = (
            is_kernel_aligned(query_RHD) and is_kernel_aligned(key_RGD, 8) and is_kernel_aligned(value_RGD, 8)
        )
        if not well or not (isinstance(out, Quantized) or is_kernel_aligned(out)):
            problems.append("heads side by side, each at a multiple of 8 bytes, queries and outputs of 16")
        integers = lengths_R.dtype == table_RB.dtype == torch.int32 and table_RB.shape[0] >= requests
        if slots_R is not None:
            integers &= slots_R.dtype == torch.int64 and slots_R.shape[0] >= requests
        if not integers:
            problems.append("int32 lengths, int64 slots, and a table with a row for each")
        q, k, v = scales
        if not q.numel() == k.numel() == v.numel() in (1, self.kv_heads) or not all(map(_is_plain, scales)):
            problems.append(f"fp32 scales, all 1 or all {self.kv_heads}")
        if not self._are_sinks(sinks_H):
            expected = f"BF16 sinks ({self.heads},)" if self.kind.sinks else "no sinks"
            problems.append(expected)
        if problems:
            raise ValueError(f"decode_attention: expected {'; '.join(problems)}")

    def _are_sinks(self, sinks_H: Tensor | None) -> bool:
        if sinks_H is None or not self.kind.sinks:
            return sinks_H is None and not self.kind.sinks
        plain = sinks_H.dtype == torch.bfloat16 and sinks_H.is_contiguous()
        return plain and sinks_H.shape == (self.heads,)


def _out(out: Tensor | Quantized, scale_format: ScaleFormat) -> tuple[int, ...]:
    if isinstance(out, Quantized):
        places = out.codes.data_ptr(), out.scales.data_ptr(), out.scales.stride(1)
        return 0, 0, *places, scale_format == "pow2"
    return out.data_ptr(), out.stride(0), 0, 0, 0, 0


def _is_plain(scale: Tensor) -> bool:
    return scale.dtype == torch.float32 and scale.is_contiguous()


def is_kernel_aligned(part: Tensor, align: int = 16) -> bool:
    """Tell whether each row's heads are contiguous, at a multiple of so many bytes.

    Heads are `[rows, heads, D]`. The distance to a next row or head does not matter if there is none.
    """
    rows, heads, size = part.shape
    row, head, element = part.stride()
    beside = element == 1 and (heads == 1 or head == size)
    return beside and part.data_ptr() % align == 0 and (rows == 1 or row * part.element_size() % align == 0)


@functools.cache
def machine_code(
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    config: AttentionTileConfig,
    kind: AttentionKind = AttentionKind(),
) -> bytes:
    """Compile both kernels; needs no GPU."""
    macros = {"KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "TOGETHER": config.together}
    macros |= {
        "SHARES": config.shares,
        "STAGES": config.stages,
        "RESIDENT": config.resident,
        "BYTES": dtype.itemsize,
        "HEAD": kind.head_size,
        "WINDOWED": int(kind.window is not None),
        "CAPPED": int(kind.soft_cap != 0),
        "SINKS": int(kind.sinks),
    }
    return nvrtc.compile_source(_SOURCE.read_text(), {}, macros)


def decode_attention_reference(
    query_RHD: Tensor,
    cache: Tensor,
    table_RB: Tensor,
    lengths_R: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    softmax_scale: float,
    kind: AttentionKind | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute attention in fp64 `[R, H, D]`, from a cache that all tokens have joined.

    `kind`: None for plain attention. `sinks_H`: as of `DecodeStep`.
    """
    (_, heads, size), kv_heads = query_RHD.shape, cache.shape[1]
    kind = kind or AttentionKind(size)
    q_scale, k_scale, v_scale = (scale.double().expand(kv_heads)[:, None, None] for scale in scales)
    rows = []
    for query, table, length in zip(query_RHD, table_RB, lengths_R.tolist(), strict=True):
        blocks = table[: -(-length // cache.shape[2])].long()
        cached = cache[blocks].double().transpose(0, 1).flatten(1, 2)[:, :length]
        keys, values = cached[:, -kind.window :].split(size, -1) if kind.window else cached.split(size, -1)
        grouped = query.double().view(kv_heads, heads // kv_heads, size) * q_scale
        scores = grouped @ (keys * k_scale).transpose(1, 2) * softmax_scale
        if kind.soft_cap:
            scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
        if sinks_H is not None:
            scores = torch.cat((scores, sinks_H.double().view(*scores.shape[:2], 1)), -1)
        weights = torch.softmax(scores, -1)[..., : keys.shape[1]]
        rows.append((weights @ (values * v_scale)).view(heads, size))
    return torch.stack(rows)
