# SPDX-License-Identifier: Apache-2.0
"""Many weights in one launch, against one at a time and the reference."""

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.kernels.quantize.quantize_weight import empty_like
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.quantize import quantize_weights_batched
from vllm_fp8ext.kernels.quantize.quantize_weights_batched import Destination, QuantizeBatched

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = (((128, 128), (128, 256), (256, 128)), ((130, 96), (1, 144), (20, 16)))
"""Of whole blocks, and of others; few, since each takes the interpreter a second."""


def destination(weight: Tensor) -> Destination:
    """Codes and scales full of what a forgotten element would show."""
    codes, scales = empty_like(weight)
    codes.view(torch.uint8).fill_(0x7F)
    return Destination(codes, scales.fill_(float("nan")), weight.stride(0))


def addresses(weights: list[Tensor]) -> Tensor:
    return torch.tensor([weight.data_ptr() for weight in weights])


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES, ids=["whole", "others"])
def test_each_is_what_it_is_by_itself(
    device: str, shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, scale_format: ScaleFormat
) -> None:
    weights = [
        hard_cases.awkward(*shape, kind, dtype, seed).to(device)
        for seed, (shape, kind) in enumerate(zip(shapes, ("normal", "heavy", "zeros"), strict=True))
    ]
    places = [destination(weight) for weight in weights]
    sums = QuantizeBatched(places, dtype, scale_format).queue(addresses(weights))
    for weight, place, (error, norm, wrong) in zip(weights, places, sums.tolist(), strict=True):
        expected = reference.quantize_weight(weight.cpu(), scale_format)
        assert kernel_cases.same(place.codes_NK, expected[0])
        assert kernel_cases.same(place.scales_NbKb, expected[1])
        lost = reference.dequantize_weight(*expected).double() - weight.cpu().double()
        assert error == pytest.approx(float(lost.square().sum()), rel=1e-3)
        assert norm == pytest.approx(float(weight.double().square().sum()), rel=1e-3)
        assert not wrong


def test_several_launches_are_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [hard_cases.awkward(*shape, "normal", torch.bfloat16).to(device) for shape in SHAPES[0]]
    places = [[destination(weight) for weight in weights] for _ in range(2)]
    whole = QuantizeBatched(places[0], torch.bfloat16, "fp32").queue(addresses(weights))
    monkeypatch.setattr(quantize_weights_batched, "SLICE_BLOCKS", 2)
    sizes: list[int] = []
    sliced = QuantizeBatched(places[1], torch.bfloat16, "fp32").queue(addresses(weights), sizes.append)
    assert sizes == [2 * 128 * 128 * 2, 2 * 128 * 128 * 2, 128 * 128 * 2]
    assert torch.equal(whole, sliced)
    for one, other in zip(*places, strict=True):
        assert kernel_cases.same(one.codes_NK, other.codes_NK)
        assert kernel_cases.same(one.scales_NbKb, other.scales_NbKb)


def test_the_same_places_take_other_weights(device: str) -> None:
    one, other = (hard_cases.awkward(256, 128, "heavy", torch.bfloat16, seed).to(device) for seed in (1, 2))
    place = destination(one)
    together = QuantizeBatched([place], one.dtype, "fp32")
    result = [together.queue(addresses([weight])).cpu() for weight in (one, other, one)]
    assert torch.equal(result[0], result[2])
    assert not torch.equal(result[0], result[1])
    assert kernel_cases.same(place.codes_NK, reference.quantize_weight(one.cpu(), "fp32")[0])


def test_what_lies_beside_a_part_stays_as_it_is(device: str) -> None:
    weight = hard_cases.awkward(192, 96, "heavy", torch.bfloat16).to(device)
    codes = torch.full((256, 128), 0x55, dtype=torch.uint8, device=device)
    scales = torch.zeros(2, 1, device=device)
    place = Destination(codes[:192, :96].view(torch.float8_e4m3fn), scales, 96)
    assert place.takes(weight.dtype)
    QuantizeBatched([place], weight.dtype, "fp32").queue(addresses([weight]))
    expected = reference.quantize_weight(weight.cpu(), "fp32")
    assert kernel_cases.same(place.codes_NK, expected[0])
    assert kernel_cases.same(scales, expected[1])
    assert (codes[192:] == 0x55).all()
    assert (codes[:, 96:] == 0x55).all()


def test_parts_of_larger_matrices_are_read_and_written_in_place(device: str) -> None:
    weight = hard_cases.awkward(384, 512, "heavy", torch.bfloat16).to(device)[128:, 256:]
    codes = torch.zeros(388, 304, dtype=torch.uint8, device=device)
    scales = torch.zeros(4, 5, device=device)
    inside = codes[128:384, 32:288].view(torch.float8_e4m3fn)
    place = Destination(inside, scales[1:3, 1:3], 512)
    assert place.takes(weight.dtype)
    QuantizeBatched([place], weight.dtype, "fp32").queue(addresses([weight]))
    expected = reference.quantize_weight(weight.cpu(), "fp32")
    assert kernel_cases.same(inside, expected[0])
    assert kernel_cases.same(scales[1:3, 1:3], expected[1])
    inside.view(torch.uint8).zero_()
    scales[1:3, 1:3] = 0
    assert not codes.any()
    assert not scales.any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_shows_in_its_own_weight(device: str) -> None:
    weights = [hard_cases.awkward(256, 128, "normal", torch.bfloat16).to(device) for _ in range(3)]
    weights[1][130, 3] = float("nan")
    weights[1][3, 3] = float("inf")
    places = [destination(weight) for weight in weights]
    sums = QuantizeBatched(places, torch.bfloat16, "fp32").queue(addresses(weights))
    assert sums[:, 2].tolist() == [0.0, 2.0, 0.0]


def codes_of(rows: int, columns: int, distance: int, first: int = 0) -> Tensor:
    room = torch.zeros(rows * distance + 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return room[(-room.data_ptr()) % 16 + first :][: rows * distance].view(rows, distance)[:, :columns]


@pytest.mark.parametrize(
    ("codes", "row", "dtype"),
    [
        (codes_of(128, 128, 128), 100, torch.float32),
        (codes_of(0, 128, 128), 128, torch.float32),
        (codes_of(128, 128, 128).T, 128, torch.float32),
        (codes_of(128, 128, 136), 128, torch.float32),
        (codes_of(128, 128, 128, 1), 128, torch.float32),
        (codes_of(128, 128, 128), 128, torch.float64),
    ],
    ids=["rows", "empty", "transposed", "distance", "address", "dtype"],
)
def test_what_can_not_go_with_others(codes: Tensor, row: int, dtype: torch.dtype) -> None:
    scales = torch.zeros(1, 1)
    assert Destination(codes_of(128, 128, 128), scales, 128).takes(torch.float32)
    assert not Destination(codes, scales, row).takes(dtype)
