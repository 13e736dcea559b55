# SPDX-License-Identifier: Apache-2.0
"""Rewrites cached FP8 K and V in place for scales that have changed.

A code becomes `code * ratio`, the product in fp32, rounded to nearest even and clamped to ±448 in E4M3; `ratio` is the old
scale by the new one. Steps by a power of two are exact short of clamping and of underflow. NaN stays NaN, as 0x7F.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, FP8_MAX

_SLICE_CODES = 1 << 22
"""Codes rescaled at once by the reference: bounds each fp32 temporary to 16 MiB."""
NAN_CODE = 0x7F


@dataclass(frozen=True)
class CachedLayer:
    """The K and V cache of one attention layer, and how they change.

    `k`, `v`: views of bytes (uint8, or float8_e4m3fn) `[blocks, block_size, heads, head_dim]` with any strides but contiguous
    head_dim; which token a row is does not matter, so rows and the columns of a head may be permuted within a block.
    `k_ratio`, `v_ratio`: fp32 `[heads]` (`ratio_of`).
    """

    k: Tensor
    v: Tensor
    k_ratio: Tensor
    v_ratio: Tensor

    @property
    def unchanged(self) -> bool:
        """True if every ratio is exactly 1."""
        return bool((self.k_ratio == 1).all() and (self.v_ratio == 1).all())


@dataclass(frozen=True)
class RescaleCounts:
    """Counts over the codes that were rewritten: all of them, those that were clamped now, and those that were not zero and
    are now."""

    codes: int = 0
    saturated: int = 0
    flushed: int = 0

    def __add__(self, other: "RescaleCounts") -> "RescaleCounts":
        return RescaleCounts(
            self.codes + other.codes, self.saturated + other.saturated, self.flushed + other.flushed
        )


def ratio_of(old: Tensor, new: Tensor, heads: int) -> Tensor:
    """Divide old by new scales, one for all heads or one for each: fp32 `[heads]` on the CPU.

    Raises:
        ValueError: a ratio is not a positive finite number.
    """
    ratio = (old.detach().cpu().float() / new.detach().cpu().float()).expand(heads).contiguous()
    if not bool((torch.isfinite(ratio) & (ratio > 0)).all()):
        raise ValueError(f"rescale_kv: expected positive finite ratios of scales, found {ratio.tolist()}")
    return ratio


def rescale_kv(layers: Sequence[CachedLayer], blocks: Sequence[int]) -> RescaleCounts:
    """Rewrite the codes in these blocks in place; waits until that is done.

    Layers whose ratios are all 1 stay as they are. On a GPU one launch for all layers whose caches are laid out alike.
    `blocks`: rows of `k` and `v`, each once: those of one KV cache group, since the same row is another request's in another
    group.

    Raises:
        ValueError: a block comes twice or is outside a cache, or K and V differ in shape or in the distance of blocks.
            Nothing was written.
    """
    changed = [layer for layer in layers if not layer.unchanged]
    if not changed or not blocks:
        return RescaleCounts()
    _require_blocks(changed, blocks)
    here = torch.tensor(blocks, dtype=torch.int64, device=changed[0].k.device)
    if here.is_cuda:
        from vllm_fp8ext.kernels.attention.rescale_kv_triton import Rescaling

        rescaling = Rescaling(changed, here)
        rescaling.run()
        return rescaling.counts()
    return rescale_kv_reference(changed, here)


def warm_up(layers: Sequence[CachedLayer]) -> None:
    """Compile what `rescale_kv` launches for these layers' caches.

    It rewrites block 0, which no request holds, with ratios of 1. Does nothing on a CPU.
    """
    if layers and layers[0].k.is_cuda:
        from vllm_fp8ext.kernels.attention.rescale_kv_triton import Rescaling

        ones = [CachedLayer(layer.k, layer.v, *(torch.ones(layer.k.shape[2]),) * 2) for layer in layers]
        Rescaling(ones, torch.zeros(1, dtype=torch.int64, device=layers[0].k.device)).run()


def rescale_kv_reference(layers: Sequence[CachedLayer], blocks: Tensor) -> RescaleCounts:
    """Rewrite in plain torch, on any device.

    Temporaries take at most 50 MiB, or a block.
    """
    total = RescaleCounts()
    for layer in layers:
        for cache, ratio in ((layer.k, layer.k_ratio), (layer.v, layer.v_ratio)):
            codes = cache.view(torch.uint8)
            step = max(1, _SLICE_CODES // codes[0].numel())
            for some in blocks.split(step):
                old = codes[some]
                new, saturated = rescaled(old, ratio.to(codes.device)[:, None])
                codes[some] = new
                flushed = ((old & 0x7F) != 0) & ((new & 0x7F) == 0)
                total += RescaleCounts(old.numel(), int(saturated.sum()), int(flushed.sum()))
    return total


def rescaled(codes: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return new codes (uint8) of old ones, and which of them were clamped.

    `codes`: uint8 of any shape. `ratio`: broadcasts to it.
    """
    exact = codes.view(FP8_DTYPE).float() * ratio
    new = exact.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE).view(torch.uint8)
    return new.masked_fill_(exact.isnan(), NAN_CODE), exact.abs() > FP8_MAX


def counted_range(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the range of magnitudes that a ratio clamps or flushes to zero.

    A ratio above 1 clamps, one below 1 flushes. The range is its middle and its half width, both exact, fp32 of the shape of
    `ratio`; the width is negative where there are none.
    """
    codes = torch.arange(NAN_CODE, dtype=torch.uint8)
    values = codes.view(FP8_DTYPE).float().expand(*ratio.shape, -1)
    new, saturated = rescaled(codes, ratio[..., None])
    counted = torch.where(ratio[..., None] > 1, saturated, (new == 0) & (values > 0))
    low = values.masked_fill(~counted, 2 * FP8_MAX).amin(-1)
    high = values.masked_fill(~counted, 0.0).amax(-1)
    return (high + low) / 2, (high - low) / 2


def _require_blocks(layers: Sequence[CachedLayer], blocks: Sequence[int]) -> None:
    if len(set(blocks)) != len(blocks):
        raise ValueError("rescale_kv: expected each block once, found one twice")
    for layer in layers:
        if layer.k.shape != layer.v.shape or layer.k.stride(0) != layer.v.stride(0):
            raise ValueError(
                f"rescale_kv: expected K and V alike, found {list(layer.k.shape)} with strides {layer.k.stride()} and "
                f"{list(layer.v.shape)} with strides {layer.v.stride()}"
            )
        if layer.k.stride(3) != 1 or layer.v.stride(3) != 1:
            raise ValueError(f"rescale_kv: expected contiguous heads, found strides {layer.k.stride()}")
        if min(blocks) < 0 or max(blocks) >= layer.k.shape[0]:
            raise ValueError(
                f"rescale_kv: expected blocks below {layer.k.shape[0]}, found {min(blocks)} to {max(blocks)}"
            )
