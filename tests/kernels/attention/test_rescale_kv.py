# SPDX-License-Identifier: Apache-2.0
"""FP8 K and V rewritten for other scales: the reference against exact arithmetic, the kernel against the reference."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.kernels.attention.rescale_kv import (
    CachedLayer,
    RescaleCounts,
    ratio_of,
    rescale_kv,
    rescaled,
    warm_up,
)
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE

MAGNITUDES = [(m / 8 if not e else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][
    :127
]
"""Of the codes 0 to 126, by the definition of E4M3."""
RATIOS = (1.0, 2.0, 0.5, 2.0**-5, 8.0, 0.7310585975646973, 1.4426950216293335, 3e-3, 700.0, 1e30, 1e-30)


def nearest(exact: Fraction) -> tuple[int, bool]:
    """Code of a magnitude, to nearest even; and whether it was clamped."""
    if exact > 448:
        return 126, True
    distances = [(abs(Fraction(value) - exact), code % 2, code) for code, value in enumerate(MAGNITUDES)]
    return min(distances)[2], False


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_code_is_rounded_by_definition(ratio: float) -> None:
    ratio32 = torch.tensor(ratio)
    codes = torch.arange(256, dtype=torch.uint8)
    new, clamped = rescaled(codes, ratio32)
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert (int(new[code]), bool(clamped[code])) == (0x7F, False)
            continue
        product = torch.tensor(MAGNITUDES[code & 0x7F]) * ratio32
        expected, over = nearest(Fraction(float(product)))
        assert (int(new[code]), bool(clamped[code])) == (expected | code & 0x80, over)


@pytest.mark.parametrize("step", [-3, -1, 1, 2])
def test_steps_by_a_power_of_two_are_exact_and_come_back(step: int) -> None:
    old = torch.tensor([0.013, 0.7, 3.1])
    ratio = ratio_of(old, old * 2.0**step, 3)
    assert ratio.tolist() == [2.0**-step] * 3
    inside = [c for c, m in enumerate(MAGNITUDES) if 2.0**-6 <= m * 2.0**-step <= 448 and m >= 2.0**-6]
    codes = torch.tensor(inside, dtype=torch.uint8)
    new, _ = rescaled(codes, ratio[0])
    assert torch.equal(new.view(FP8_DTYPE).float(), codes.view(FP8_DTYPE).float() * 2.0**-step)
    assert torch.equal(rescaled(new, 1 / ratio[0])[0], codes)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_without_a_ratio_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="expected positive finite ratios"):
        ratio_of(torch.tensor(1.0), torch.tensor([0.5, wrong]), 2)


def hnd(blocks: int, size: int, heads: int, width: int, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Heads outside, K and V of a token beside each other."""
    cache = codes.view(blocks, heads, size, 2 * width).transpose(1, 2)
    return cache[..., :width], cache[..., width:]


def nhd(blocks: int, size: int, heads: int, width: int, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens outside."""
    cache = codes.view(blocks, size, heads, 2 * width)
    return cache[..., :width], cache[..., width:]


def halves(blocks: int, size: int, heads: int, width: int, codes: Tensor) -> tuple[Tensor, Tensor]:
    """All K of a head and block, then its V, as on CPUs."""
    cache = codes.view(blocks, heads, 2, size, width).transpose(2, 3).transpose(1, 2)
    return cache[..., 0, :], cache[..., 1, :]


def apart(blocks: int, size: int, heads: int, width: int, codes: Tensor) -> tuple[Tensor, Tensor]:
    """V of all blocks first, then K."""
    cache = codes.view(2, blocks, size, heads, width)
    return cache[1], cache[0]


LAYOUTS = (hnd, nhd, halves, apart)
Layout = Callable[[int, int, int, int, Tensor], tuple[Tensor, Tensor]]


def memory(count: int, kind: str, seed: int) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    if kind == "any":
        return torch.randint(0, 256, (count,), generator=noise, dtype=torch.uint8)
    if kind == "zeros":
        return torch.randint(0, 2, (count,), generator=noise, dtype=torch.uint8) << 7
    values = torch.randn(count, generator=noise) * torch.exp(3 * torch.randn(count, generator=noise))
    return values.clamp(-448, 448).to(FP8_DTYPE).view(torch.uint8)


@st.composite
def ratios(draw: st.DrawFn, heads: int) -> Tensor:
    if draw(st.booleans()):
        return torch.full((heads,), draw(st.sampled_from(RATIOS)))
    return torch.tensor([draw(st.sampled_from(RATIOS)) for _ in range(heads)])


@given(st.data())
@settings(max_examples=40)
def test_only_the_blocks_named_are_rewritten(data: st.DataObject) -> None:
    """The reference on a whole cache, against the definition of one code."""
    layers, memories = some_layers(data, "cpu")
    before = [codes.clone() for codes in memories]
    blocks = data.draw(st.permutations(range(BLOCKS)))[: data.draw(st.integers(0, BLOCKS))]
    counts = rescale_kv(layers, blocks)
    total = RescaleCounts()
    for layer, codes, was in zip(layers, memories, before, strict=True):
        expected = was.clone()
        if not layer.unchanged:
            copied = layer_of(data_layout(layer), expected, layer)
            for old, new, ratio in ((copied.k, layer.k, layer.k_ratio), (copied.v, layer.v, layer.v_ratio)):
                for block in blocks:
                    wanted, clamped = rescaled(old[block].contiguous(), ratio[:, None])
                    flushed = (old[block] & 127 != 0) & (wanted & 127 == 0)
                    total += RescaleCounts(wanted.numel(), int(clamped.sum()), int(flushed.sum()))
                    old[block] = wanted
                    assert torch.equal(new[block], wanted)
        assert torch.equal(codes, expected)
    assert counts == total


BLOCKS = 5
_LAYOUT_OF: dict[int, tuple[Layout, tuple[int, int, int]]] = {}


def data_layout(layer: CachedLayer) -> tuple[Layout, tuple[int, int, int]]:
    return _LAYOUT_OF[id(layer)]


def layer_of(layout: tuple[Layout, tuple[int, int, int]], codes: Tensor, like: CachedLayer) -> CachedLayer:
    make, sizes = layout
    return CachedLayer(*make(BLOCKS, *sizes, codes), like.k_ratio, like.v_ratio)


def some_layers(data: st.DataObject, device: str) -> tuple[list[CachedLayer], list[Tensor]]:
    """Up to four layers, of one or of several layouts, and the memory of each."""
    _LAYOUT_OF.clear()
    count, alike = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    drawn = st.tuples(
        st.sampled_from(LAYOUTS), st.integers(1, 9), st.integers(1, 3), st.sampled_from((16, 32, 80, 12))
    )
    first = data.draw(drawn)
    layers, memories = [], []
    for _ in range(count):
        make, size, heads, width = first if alike else data.draw(drawn)
        kind, seed = data.draw(st.sampled_from(("any", "zeros", "heavy"))), data.draw(st.integers(0, 999))
        codes = memory(2 * BLOCKS * size * heads * width, kind, seed).to(device)
        layer = CachedLayer(
            *make(BLOCKS, size, heads, width, codes), data.draw(ratios(heads)), data.draw(ratios(heads))
        )
        _LAYOUT_OF[id(layer)] = (make, (size, heads, width))
        layers.append(layer)
        memories.append(codes)
    return layers, memories


def test_layers_with_ratios_of_one_are_left_alone() -> None:
    """Even a NaN of negative sign, which a rewriting would change."""
    ones, codes = torch.ones(2), torch.full((2 * 3 * 4 * 2 * 16,), 0xFF, dtype=torch.uint8)
    assert rescale_kv([CachedLayer(*nhd(3, 4, 2, 16, codes), ones, ones)], [0, 1]) == RescaleCounts()
    assert (codes == 0xFF).all()


def test_counts() -> None:
    """Of a K of 1s and a V of the smallest code."""
    codes = torch.zeros(2, 1, 4, 1, 16, dtype=torch.uint8)
    codes[1], codes[0] = 0x38, 0x01
    layer = CachedLayer(*apart(1, 4, 1, 16, codes), torch.tensor([449.0]), torch.tensor([0.5]))
    assert rescale_kv([layer], [0]) == RescaleCounts(codes=128, saturated=64, flushed=64)
    assert codes.view(FP8_DTYPE).float().unique().tolist() == [0.0, 448.0]
    assert rescale_kv([layer], [0]) == RescaleCounts(codes=128, saturated=64, flushed=0)


def test_a_cache_typed_float8_is_taken_too() -> None:
    codes = memory(2 * 3 * 4 * 2 * 16, "heavy", 0)
    copy = codes.clone()
    half = torch.full((2,), 0.5)
    rescale_kv([CachedLayer(*hnd(3, 4, 2, 16, codes), half, half)], [2])
    rescale_kv([CachedLayer(*hnd(3, 4, 2, 16, copy.view(FP8_DTYPE)), half, half)], [2])
    assert torch.equal(codes, copy)


@pytest.mark.parametrize(
    ("blocks", "message"), [([1, 1], "found one twice"), ([0, 3], "below 3"), ([-1], "-1 to -1")]
)
def test_wrong_blocks_are_refused(blocks: list[int], message: str) -> None:
    codes, two = memory(2 * 3 * 4 * 2 * 16, "heavy", 0), torch.full((2,), 2.0)
    before = codes.clone()
    with pytest.raises(ValueError, match=message):
        rescale_kv([CachedLayer(*nhd(3, 4, 2, 16, codes), two, two)], blocks)
    assert torch.equal(codes, before)


def test_k_and_v_of_other_shapes_and_heads_apart_are_refused() -> None:
    k, v = nhd(3, 4, 2, 16, memory(2 * 3 * 4 * 2 * 16, "heavy", 0))
    two = torch.full((2,), 2.0)
    for pair, message in (((k, v[:, :2]), "K and V alike"), ((k[..., ::2], v[..., ::2]), "contiguous heads")):
        with pytest.raises(ValueError, match=message):
            rescale_kv([CachedLayer(*pair, two, two)], [0])


@given(st.data())
@settings(max_examples=40)
def test_the_kernel_is_the_reference(device: str, data: st.DataObject) -> None:
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    from vllm_fp8ext.kernels.attention.rescale_kv_triton import Rescaling

    layers, memories = some_layers(data, device)
    copies = [codes.cpu().clone() for codes in memories]
    copied = [layer_of(data_layout(layer), codes, layer) for layer, codes in zip(layers, copies, strict=True)]
    blocks = data.draw(st.permutations(range(BLOCKS)))[: data.draw(st.integers(1, BLOCKS))]
    changed = [layer for layer in layers if not layer.unchanged]
    if not changed:
        return
    rescaling = Rescaling(changed, torch.tensor(blocks, device=device))
    rescaling.run()
    assert rescaling.counts() == rescale_kv(copied, blocks)
    for codes, copy in zip(memories, copies, strict=True):
        assert torch.equal(codes.cpu(), copy)


@pytest.mark.parametrize("make", LAYOUTS)
def test_the_kernel_over_several_tiles(device: str, make: Layout) -> None:
    """Blocks of 1.5 tiles, of a model's head_dim."""
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    from vllm_fp8ext.kernels.attention.rescale_kv_triton import TILE_BYTES, Rescaling

    size, heads, width = 16, 6, 128
    assert 2 * size * heads * width == 1.5 * TILE_BYTES
    codes = memory(2 * 3 * size * heads * width, "any", 0).to(device)
    copy = codes.cpu().clone()
    k_ratio, v_ratio = torch.linspace(0.01, 3, heads), torch.linspace(5, 0.3, heads)
    layers = [CachedLayer(*make(3, size, heads, width, part), k_ratio, v_ratio) for part in (codes, copy)]
    rescaling = Rescaling(layers[:1], torch.tensor([2, 0], device=device))
    rescaling.run()
    assert rescaling.counts() == rescale_kv(layers[1:], [2, 0])
    assert torch.equal(codes.cpu(), copy)


def test_warming_up_changes_nothing(device: str) -> None:
    codes = memory(2 * 3 * 4 * 2 * 16, "heavy", 0).to(device)
    before, half = codes.clone(), torch.full((2,), 0.5)
    warm_up([CachedLayer(*nhd(3, 4, 2, 16, codes), half, half)])
    warm_up([])
    assert torch.equal(codes, before)
