# SPDX-License-Identifier: Apache-2.0
"""The numerics against an oracle in numpy and fractions that shares no code with them."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, NonFiniteError, ScaleFormat

FORMATS: tuple[ScaleFormat, ...] = ("fp32", "pow2")
FLOOR = np.float32(1e-10)
ULP = 2.0**-23
DTYPES = (torch.bfloat16, torch.float32)

MAGNITUDES = np.array(
    [
        (code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
        for code in range(127)
    ]
)
"""What the E4M3 codes 0 to 126 stand for (OCP 8-bit floating point specification, section 5.2)."""

SIZES = st.one_of(
    st.integers(1, 9), st.sampled_from((126, 127, 128, 129, 130, 255, 256, 257)), st.integers(1, 300)
)


def normal(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=noise)


def heavy(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    return normal(shape, noise) * torch.exp(4 * normal(shape, noise))


def sparse(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    """Whole blocks of zeros, of both signs."""
    values = normal(shape, noise)
    values[: 2 * BLOCK, :BLOCK] *= 0.0
    return values


def around_floor(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    return normal(shape, noise) * 5e-11


def subnormal(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    return normal(shape, noise) * 2.0**-130


def large(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    """Near the end of the range, but where a code rounded up can still be scaled back."""
    return normal(shape, noise).clamp(-1, 1) * 3e38


KINDS = (normal, heavy, sparse, around_floor, subnormal, large)


@st.composite
def tensors(draw: st.DrawFn, rows: st.SearchStrategy[int] = SIZES) -> Tensor:
    """BF16 or fp32 tensors of every kind and of ragged shapes."""
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    shape = draw(rows), draw(SIZES)
    return draw(st.sampled_from(KINDS))(shape, noise).to(draw(st.sampled_from(DTYPES)))


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    """Codes and scales agree bit for bit."""
    return all(a.shape == b.shape and bits(a) == bits(b) for a, b in zip(first, second, strict=True))


def oracle_scale(amax: np.float32, scale_format: ScaleFormat) -> np.float32:
    amax = max(amax, FLOOR)
    if scale_format == "fp32":
        return amax / np.float32(448)
    exact, power = Fraction(float(amax)), Fraction(1)
    while 448 * power >= exact:
        power /= 2
    while 448 * power < exact:
        power *= 2
    return np.float32(float(power))


def oracle_codes(quotients: np.ndarray) -> np.ndarray:
    """The nearest code of each quotient, of two equally near ones the even one."""
    middles = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    magnitudes = np.minimum(np.abs(quotients).astype(np.float64), 448)
    codes = np.searchsorted(middles, magnitudes, side="left")
    tied = (codes < len(middles)) & (middles[np.minimum(codes, len(middles) - 1)] == magnitudes)
    codes += tied & (codes % 2 == 1)
    return (codes + 128 * np.signbit(quotients)).astype(np.uint8)


def oracle(tensor: Tensor, scale_format: ScaleFormat, block_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (as bytes) and scales of a tensor, block by block."""
    values = tensor.float().numpy()
    rows, columns = values.shape
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((-(-rows // block_rows), -(-columns // 128)), np.float32)
    for i, j in np.ndindex(*scales.shape):
        block = slice(i * block_rows, (i + 1) * block_rows), slice(j * 128, (j + 1) * 128)
        scales[i, j] = oracle_scale(np.abs(values[block]).max(), scale_format)
        codes[block] = oracle_codes(values[block] / scales[i, j])
    return codes, scales


# --- scales


AMAX = st.floats(0, float(np.finfo(np.float32).max), width=32)


@given(AMAX)
@example(0.0)
@example(float(FLOOR))
@example(float(np.nextafter(FLOOR, np.float32(1))))
@example(448.0)
@example(float(np.nextafter(np.float32(448), np.float32(0))))
@example(float(np.nextafter(np.float32(448), np.float32(500))))
@example(224.0)
@example(float(np.finfo(np.float32).max))
@settings(max_examples=300)
def test_fp32_scale_is_the_nearest_to_the_exact_quotient(amax: float) -> None:
    scale = np.float32(reference.scale_of(torch.tensor(amax), "fp32").item())
    effective = max(np.float32(amax), FLOOR)
    assert scale == effective / np.float32(448)
    exact = Fraction(float(effective)) / 448
    distance = abs(Fraction(float(scale)) - exact)
    for neighbour in (np.nextafter(scale, np.float32(0)), np.nextafter(scale, np.float32(np.inf))):
        assert distance <= abs(Fraction(float(neighbour)) - exact)


@given(AMAX)
@example(0.0)
@example(float(FLOOR))
@example(448.0)
@example(float(np.nextafter(np.float32(448), np.float32(0))))
@example(float(np.nextafter(np.float32(448), np.float32(500))))
@example(448.0 * 2**-30)
@example(float(np.nextafter(np.float32(448 * 2.0**60), np.float32(np.inf))))
@example(float(np.finfo(np.float32).max))
@settings(max_examples=300)
def test_pow2_scale_is_the_smallest_power_of_two_that_reaches(amax: float) -> None:
    scale = reference.scale_of(torch.tensor(amax), "pow2")
    assert reference.is_pow2(scale)
    power, effective = Fraction(scale.item()), Fraction(float(max(np.float32(amax), FLOOR)))
    assert power.numerator & (power.numerator - 1) == 0
    assert power.denominator & (power.denominator - 1) == 0
    assert 448 * power >= effective
    assert 448 * power / 2 < effective


def test_pow2_scale_at_every_power_boundary() -> None:
    """448 * 2^e and its two neighbours, over the whole range of amax: there a rounded quotient could
    mislead."""
    boundaries = np.float32(448) * np.exp2(np.arange(-42, 119)).astype(np.float32)
    below, above = np.nextafter(boundaries, np.float32(0)), np.nextafter(boundaries, np.float32(np.inf))
    powers = torch.from_numpy(boundaries / np.float32(448))
    assert torch.equal(reference.scale_of(torch.from_numpy(boundaries), "pow2"), powers)
    assert torch.equal(reference.scale_of(torch.from_numpy(below), "pow2"), powers)
    assert torch.equal(reference.scale_of(torch.from_numpy(above), "pow2"), powers * 2)


@pytest.mark.parametrize("scales", [[3.0], [1.0, 0.75], [0.0], [float("inf")], [float("nan")]])
def test_is_pow2_refuses(scales: list[float]) -> None:
    assert not reference.is_pow2(torch.tensor(scales))


def test_is_pow2_takes_all_powers() -> None:
    assert reference.is_pow2(torch.from_numpy(np.exp2(np.arange(-126, 128)).astype(np.float32)))


def test_unknown_scale_format_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'fp32' or 'pow2', found 'e8m0'"):
        reference.quantize_weight(torch.ones(2, 2), "e8m0")  # type: ignore[arg-type]  # what is tested


# --- quantizers


@given(tensors(), st.sampled_from(FORMATS))
@settings(max_examples=40)
def test_weight_codes_and_scales_are_the_oracles(weight: Tensor, scale_format: ScaleFormat) -> None:
    codes, scales = reference.quantize_weight(weight, scale_format)
    assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert codes.is_contiguous()
    expected_codes, expected_scales = oracle(weight, scale_format, BLOCK)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected_codes)


@given(tensors(st.integers(1, 9)), st.sampled_from(FORMATS))
@settings(max_examples=30)
def test_activation_codes_and_scales_are_the_oracles(x: Tensor, scale_format: ScaleFormat) -> None:
    codes, scales = reference.quantize_activation(x, scale_format)
    expected_codes, expected_scales = oracle(x, scale_format, 1)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected_codes)


def test_codes_round_to_nearest_even_between_any_two() -> None:
    """Each middle between two codes, and its neighbours in fp32, with a scale of 1."""
    middles = ((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2).astype(np.float32)
    near = np.concatenate(
        [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf)), [448]]
    ).astype(np.float32)
    weight = torch.from_numpy(np.stack([near, -near]).T.copy())
    # 382 rows make three blocks: 448 in each of them holds the scale at 1
    weight[::BLOCK] = 448.0
    codes, scales = reference.quantize_weight(weight, "fp32")
    assert (scales == 1).all()
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), oracle_codes(weight.numpy()))


@given(tensors(), st.sampled_from(FORMATS))
@settings(max_examples=40)
def test_weight_error_is_bounded(weight: Tensor, scale_format: ScaleFormat) -> None:
    """E4M3 has 3 mantissa bits: half a step is 2^-4 of a normal value; subnormal codes are 2^-9 apart: half
    is 2^-10 of the scale. Dividing by the scale and multiplying by it again add one fp32 rounding each (none
    when it is a power of two), and so does the scale: amax / scale may exceed 448, and is clamped, by one
    more."""
    codes, scales = reference.quantize_weight(weight, scale_format)
    spread = scales.double().repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    spread = spread.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    values = weight.double()
    slack = 4 * reference.ROUND_OFF * (values.abs() + spread * 2.0**-9) if scale_format == "fp32" else 0.0
    bound = torch.maximum(values.abs() * 2.0**-4, spread * 2.0**-10) + slack
    assert ((reference.dequantize_weight(codes, scales).double() - values).abs() <= bound).all()


@pytest.mark.parametrize("scale_format", FORMATS)
def test_error_bound_is_reached(scale_format: ScaleFormat) -> None:
    """17 lies half-way between the codes 16 and 18, 2^-10 between 0 and 2^-9: nothing tighter holds."""
    weight = torch.tensor([[448.0, 17.0, 2.0**-10]])
    errors = (reference.dequantize_weight(*reference.quantize_weight(weight, scale_format)) - weight).abs()
    assert errors.tolist() == [[0.0, 1.0, 2.0**-10]]
    assert errors[0, 1] >= 17 * 2.0**-4 * 16 / 17


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_blocks_have_zero_codes_and_the_floors_scale(scale_format: ScaleFormat, zero: float) -> None:
    weight = torch.full((130, 200), zero)
    codes, scales = reference.quantize_weight(weight, scale_format)
    assert (scales == float(oracle_scale(np.float32(0), scale_format))).all()
    assert (reference.dequantize_weight(codes, scales) == 0).all()


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("tiny", [2.0**-149, 2.0**-133, 2.0**-126, 1e-14])
def test_weights_far_below_the_floor_become_zero(scale_format: ScaleFormat, tiny: float) -> None:
    """A block of nothing but noise below 2^-10 of the floor's scale has codes of zero, never NaN or
    infinity."""
    tiny = min(tiny, float(oracle_scale(np.float32(0), scale_format)) * 2.0**-10)
    weight = torch.tensor([[tiny, -tiny]])
    codes, scales = reference.quantize_weight(weight, scale_format)
    assert codes.view(torch.uint8).tolist() == [[0x00, 0x80]]
    assert bool(torch.isfinite(scales).all())


@pytest.mark.parametrize(("scale_format", "code"), [("fp32", 448.0), ("pow2", 256.0)])
def test_the_largest_bf16_weight(scale_format: ScaleFormat, code: float) -> None:
    largest = torch.finfo(torch.bfloat16).max
    weight = torch.tensor([[largest, -largest, 0.0]], dtype=torch.bfloat16)
    codes, scales = reference.quantize_weight(weight, scale_format)
    assert reference.expand(codes).tolist() == [[code, -code, 0.0]]
    values = reference.expand(codes).double() * scales.double()
    assert torch.allclose(values, weight.double(), rtol=2.0**-4, atol=0)


@given(
    tensors(),
    st.sampled_from((float("nan"), float("inf"), -float("inf"))),
    st.sampled_from(FORMATS),
    st.data(),
)
@settings(max_examples=40)
def test_non_finite_weights_are_refused(
    weight: Tensor, value: float, scale_format: ScaleFormat, data: st.DataObject
) -> None:
    row, column = (data.draw(st.integers(0, size - 1)) for size in weight.shape)
    weight[row, column] = value
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        reference.quantize_weight(weight, scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_activations_never_become_finite(scale_format: ScaleFormat, value: float) -> None:
    """An activation can't be refused in the middle of a step; what must not happen is that it turns into a
    number."""
    x = torch.ones(2, 256)
    x[1, 130] = value
    codes, scales = reference.quantize_activation(x, scale_format)
    values = reference.dequantize_activation(codes, scales)
    assert not bool(torch.isfinite(values[1, 130]))
    assert torch.equal(values[0], torch.ones(256))
    assert torch.equal(values[1, :128], torch.ones(128))


# --- idempotence


@given(tensors())
@settings(max_examples=40)
def test_fp32_requantization_keeps_codes_and_settles_after_one_round(weight: Tensor) -> None:
    """Codes never change: a requantized value lies within a few ulps of its code, and codes are 2^-4 apart.

    The block's largest value is `fl(448 s)`, and 448 s = 2^6 * 7 s. For the mantissa of s below 8/7 the
    product is rounded to 2^2 ulps of s, so the error after dividing by 7 is at most 2/7 ulp and s comes back.
    Above 8/7 it is rounded to 2^3 ulps, and 4/7 ulp may lead to the neighbour of s. That neighbour s' is
    final: it is off from the quotient by half an ulp, 7 times that is below half of 2^3 ulps, so `fl(448 s')`
    is the same largest value again.
    """
    first = reference.quantize_weight(weight, "fp32")
    second = reference.quantize_weight(reference.dequantize_weight(*first), "fp32")
    assert bits(second[0]) == bits(first[0])
    assert (
        (second[1] - first[1]).abs() <= torch.frexp(first[1]).mantissa.reciprocal() * first[1] * ULP
    ).all()
    kept = torch.frexp(first[1]).mantissa < 4 / 7
    assert torch.equal(second[1][kept], first[1][kept])
    third = reference.quantize_weight(reference.dequantize_weight(*second), "fp32")
    assert same(third, second)


@given(tensors())
@settings(max_examples=40)
def test_pow2_requantization_keeps_every_value(weight: Tensor) -> None:
    """amax / scale lies in (224, 448], so a block's largest code is 224 (rounded down from at most 232), 240
    or more. From 240 on the same scale is the smallest that reaches. At 224 half of it is, and every code
    doubles, which is exact: none is above 224. A block below the floor keeps the floor's scale."""
    codes, scales = reference.quantize_weight(weight, "pow2")
    values = reference.dequantize_weight(codes, scales)
    again, scales_again = reference.quantize_weight(values, "pow2")
    assert torch.equal(reference.dequantize_weight(again, scales_again), values)
    for i, j in np.ndindex(*scales.shape):
        block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        largest = reference.expand(codes[block]).abs().max().item()
        if scales[i, j] > float(oracle_scale(np.float32(0), "pow2")):
            assert largest >= 224
        if largest == 224 and largest * scales[i, j].item() >= float(FLOOR):
            assert scales_again[i, j] == scales[i, j] / 2
            assert torch.equal(reference.expand(again[block]), reference.expand(codes[block]) * 2)
        else:
            assert scales_again[i, j] == scales[i, j]
            assert bits(again[block]) == bits(codes[block])


def test_pow2_requantization_halves_a_scale_whose_largest_code_is_224() -> None:
    codes, scales = reference.quantize_weight(torch.tensor([[232.0, 1.0]]), "pow2")
    assert (reference.expand(codes).tolist(), scales.item()) == ([[224.0, 1.0]], 1.0)
    again, halved = reference.quantize_weight(reference.dequantize_weight(codes, scales), "pow2")
    assert (reference.expand(again).tolist(), halved.item()) == ([[448.0, 2.0]], 0.5)


# --- blocks


@given(tensors(), st.sampled_from(FORMATS), st.data())
@settings(max_examples=50)
def test_blocks_are_independent(weight: Tensor, scale_format: ScaleFormat, data: st.DataObject) -> None:
    codes, scales = reference.quantize_weight(weight, scale_format)
    i, j = (data.draw(st.integers(0, size - 1)) for size in scales.shape)
    block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
    changed = weight.clone()
    changed[block] = (
        torch.linspace(-7e4, 9e4, changed[block].numel()).view(changed[block].shape).to(weight.dtype)
    )
    new_codes, new_scales = reference.quantize_weight(changed, scale_format)
    assert not same((new_codes, new_scales), (codes, scales))
    new_codes[block], new_scales[i, j] = codes[block], scales[i, j]
    assert same((new_codes, new_scales), (codes, scales))


@given(tensors(), st.sampled_from(FORMATS), st.data())
@settings(max_examples=50)
def test_slices_at_block_boundaries_quantize_to_slices(
    weight: Tensor, scale_format: ScaleFormat, data: st.DataObject
) -> None:
    codes, scales = reference.quantize_weight(weight, scale_format)
    start, left = (data.draw(st.integers(0, size - 1)) for size in scales.shape)
    stop = data.draw(st.integers(start + 1, scales.shape[0]))
    right = data.draw(st.integers(left + 1, scales.shape[1]))
    box = slice(start * BLOCK, stop * BLOCK), slice(left * BLOCK, right * BLOCK)
    part = reference.quantize_weight(weight[box], scale_format)
    assert same(part, (codes[box], scales[start:stop, left:right]))
    assert torch.equal(reference.dequantize_weight(*part), reference.dequantize_weight(codes, scales)[box])


@given(tensors(), st.sampled_from(FORMATS), st.integers(-20, 20))
@settings(max_examples=50)
def test_a_power_of_two_moves_into_the_scales(
    weight: Tensor, scale_format: ScaleFormat, exponent: int
) -> None:
    """Away from the floor, and from both ends of fp32, where the product itself would round."""
    weight = weight.float()
    amaxes = torch.nn.functional.max_pool2d(weight.abs()[None, None], BLOCK, BLOCK, ceil_mode=True)[0, 0]
    weight = weight.where(weight.abs() < 2.0**100, 1.0)
    weight = weight.where(weight.abs() > 2.0**-100, 0.0)
    codes, scales = reference.quantize_weight(weight, scale_format)
    scaled_codes, scaled_scales = reference.quantize_weight(weight * 2.0**exponent, scale_format)
    away = (amaxes >= 1e-3) & (amaxes < 2.0**100)
    assert torch.equal(scaled_scales[away], (scales * 2.0**exponent)[away])
    for i, j in away.nonzero().tolist():
        block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        assert bits(scaled_codes[block]) == bits(codes[block])


@given(tensors(st.integers(2, 9)), st.sampled_from(FORMATS))
@settings(max_examples=30)
def test_tokens_are_independent(x: Tensor, scale_format: ScaleFormat) -> None:
    """Whatever else is in a batch, a token has the same codes and scales."""
    codes, scales = reference.quantize_activation(x, scale_format)
    assert same(reference.quantize_activation(x[1:2], scale_format), (codes[1:2], scales[1:2]))


# --- expand


def test_expand_is_torchs_conversion_for_every_finite_code() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[(every & 0x7F) != 0x7F]
    assert len(finite) == 254
    codes = finite.view(torch.float8_e4m3fn)
    assert bits(reference.expand(codes)) == bits(codes.float())
    assert reference.expand(codes[:127]).tolist() == MAGNITUDES.tolist()


@given(SIZES, SIZES)
@settings(max_examples=30)
def test_dequantized_values_are_codes_times_their_blocks_scale(rows: int, columns: int) -> None:
    noise = torch.Generator().manual_seed(rows * 1000 + columns)
    codes = torch.randn(rows, columns, generator=noise).to(torch.float8_e4m3fn)
    row, column = np.ogrid[:rows, :columns]
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=noise)
    expected = codes.float().numpy() * scales.numpy()[row // 128, column // 128]
    np.testing.assert_array_equal(reference.dequantize_weight(codes, scales).numpy(), expected)
    scales = torch.rand(rows, -(-columns // 128), generator=noise)
    expected = codes.float().numpy() * scales.numpy()[row, column // 128]
    np.testing.assert_array_equal(reference.dequantize_activation(codes, scales).numpy(), expected)


# --- GEMM

Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def exact(operands: Operands) -> Tensor:
    """The product in float64: the factors have at most 24 bits, so each term is exact, and the sum nearly
    so."""
    x_codes, x_scales, codes, scales = operands
    return reference.dequantize_activation(x_codes, x_scales).double() @ (
        reference.dequantize_weight(codes, scales).double().T
    )


def quantized(x: Tensor, weight: Tensor, scale_format: ScaleFormat) -> Operands:
    return *reference.quantize_activation(x, scale_format), *reference.quantize_weight(weight, scale_format)


@given(
    st.one_of(st.just(1), st.integers(1, 40)),
    SIZES,
    SIZES,
    st.integers(0, 2**32 - 1),
    st.sampled_from((normal, heavy, sparse)),
    st.sampled_from((normal, heavy, sparse)),
    st.sampled_from(FORMATS),
)
@settings(max_examples=30)
def test_gemm_is_within_its_bound(
    m: int, n: int, k: int, seed: int, left, right, scale_format: ScaleFormat
) -> None:
    noise = torch.Generator().manual_seed(seed)
    operands = quantized(left((m, k), noise).bfloat16(), right((n, k), noise).bfloat16(), scale_format)
    product = reference.gemm(*operands)
    assert product.dtype == torch.float32
    bound = reference.gemm_error_bound(*operands)
    assert bound.shape == product.shape == (m, n)
    assert ((product.double() - exact(operands)).abs() <= bound).all()


@pytest.mark.parametrize("scale_format", FORMATS)
def test_gemm_of_zeros_is_exactly_zero(scale_format: ScaleFormat) -> None:
    operands = quantized(torch.zeros(3, 200), torch.zeros(130, 200), scale_format)
    assert (reference.gemm_error_bound(*operands) == 0).all()
    assert (reference.gemm(*operands) == 0).all()


def corrupt_weight_scale(operands: Operands) -> Operands:
    x_codes, x_scales, codes, scales = operands
    scales = scales.clone()
    scales[1, 2] *= 1 + 2.0**-6
    return x_codes, x_scales, codes, scales


def corrupt_activation_scale(operands: Operands) -> Operands:
    x_codes, x_scales, codes, scales = operands
    x_scales = x_scales.clone()
    x_scales[4, 1] *= 1 + 2.0**-6
    return x_codes, x_scales, codes, scales


def swap_weight_scales(operands: Operands) -> Operands:
    x_codes, x_scales, codes, scales = operands
    return x_codes, x_scales, codes, scales.flip(1)


def corrupt_one_code(operands: Operands) -> Operands:
    x_codes, x_scales, codes, scales = operands
    codes = codes.clone()
    codes.view(torch.uint8)[7, 9] ^= 0x80
    return x_codes, x_scales, codes, scales


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(
    "corrupt", [corrupt_weight_scale, corrupt_activation_scale, swap_weight_scales, corrupt_one_code]
)
def test_the_bound_notices_a_wrong_operand(corrupt, scale_format: ScaleFormat) -> None:
    """A scale that is off by 1.6 %, scales in a wrong order and a single wrong code each leave the bound.
    (Scales in a wrong order are not always wrong: the blocks' sizes differ here so that they are.)"""
    noise = torch.Generator().manual_seed(7)
    weight = normal((300, 500), noise) * torch.tensor([1.0, 2.0, 4.0, 9.0]).repeat_interleave(BLOCK)[:500]
    operands = quantized(normal((8, 500), noise).bfloat16(), weight.bfloat16(), scale_format)
    wrong = reference.gemm(*corrupt(operands)).double()
    assert ((wrong - exact(operands)).abs() > reference.gemm_error_bound(*operands)).any()
