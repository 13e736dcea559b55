# SPDX-License-Identifier: Apache-2.0
"""Many weights in one launch, against one at a time and the reference."""

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels import cases, reference
from vllm_fp8ext.kernels.quantize_weight import empty_like
from vllm_fp8ext.kernels.reference import ScaleFormat

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels import quantize_together, quantize_weight_triton
from vllm_fp8ext.kernels.quantize_together import Together

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = (((128, 128), (256, 384), (384, 128)), ((130, 192), (1, 96), (300, 16)))
"""Of whole blocks, and of others."""


def destination(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and sums, full of what a forgotten element would show."""
    codes, scales = empty_like(weight)
    codes.view(torch.uint8).fill_(0x7F)
    sums = torch.full((*scales.shape, 3), float("nan"), device=weight.device)
    return codes, scales.fill_(float("nan")), sums


def same(first: Tensor, second: Tensor) -> bool:
    first, second = (part.cpu().contiguous().view(torch.uint8) for part in (first, second))
    return torch.equal(first, second)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES, ids=["whole", "others"])
def test_each_is_what_it_is_by_itself(
    device: str,
    shapes: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    scale_format: ScaleFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantize_together, "TOGETHER", 2)
    weights = [
        cases.awkward(*shape, kind, dtype, seed).to(device)
        for seed, (shape, kind) in enumerate(zip(shapes, ("normal", "heavy", "zeros"), strict=True))
    ]
    together, found = Together(), [destination(weight) for weight in weights]
    for weight, (codes, scales, sums) in zip(weights, found, strict=True):
        assert together.add(weight, codes, scales, scale_format, sums)
    assert not found[1][1].isnan().any()  # two went already
    assert found[2][1].isnan().all()
    together.run()
    for weight, (codes, scales, sums) in zip(weights, found, strict=True):
        expected = reference.quantize_weight(weight.cpu(), scale_format)
        assert same(codes, expected[0])
        assert same(scales, expected[1])
        alone = destination(weight)
        quantize_weight_triton.launch(weight, alone[0], alone[1], scale_format, alone[2])
        assert same(sums, alone[2])


def test_weights_of_several_dtypes_and_formats_wait_together(device: str) -> None:
    together, found = Together(), []
    for dtype in DTYPES:
        for scale_format in ("fp32", "pow2"):
            weight = cases.awkward(128, 256, "normal", dtype).to(device)
            found.append((weight, scale_format, *destination(weight)))
            assert together.add(weight, *found[-1][2:4], scale_format, found[-1][4])
    together.run()
    for weight, scale_format, codes, scales, _ in found:
        expected = reference.quantize_weight(weight.cpu(), scale_format)
        assert same(codes, expected[0])
        assert same(scales, expected[1])


def test_whole_blocks_and_others_wait_beside_each_other(device: str) -> None:
    weights = [
        cases.awkward(*shape, "heavy", torch.bfloat16).to(device) for shapes in SHAPES for shape in shapes
    ]
    together, found = Together(), [destination(weight) for weight in weights]
    for weight, (codes, scales, sums) in zip(weights, found, strict=True):
        assert together.add(weight, codes, scales, "fp32", sums)
    together.run()
    for weight, (codes, scales, _) in zip(weights, found, strict=True):
        expected = reference.quantize_weight(weight.cpu(), "fp32")
        assert same(codes, expected[0])
        assert same(scales, expected[1])


def test_what_lies_beside_a_part_stays_as_it_is(device: str) -> None:
    weight = cases.awkward(192, 96, "heavy", torch.bfloat16).to(device)
    codes = torch.full((256, 128), 0x55, dtype=torch.uint8, device=device)
    scales, sums = torch.zeros(2, 1, device=device), torch.zeros(2, 1, 3, device=device)
    together = Together()
    assert together.add(weight, codes[:192, :96].view(torch.float8_e4m3fn), scales, "fp32", sums)
    together.run()
    expected = reference.quantize_weight(weight.cpu(), "fp32")
    assert same(codes[:192, :96], expected[0])
    assert same(scales, expected[1])
    assert (codes[192:] == 0x55).all()
    assert (codes[:, 96:] == 0x55).all()


def test_parts_of_larger_matrices_are_read_and_written_in_place(device: str) -> None:
    weight = cases.awkward(384, 512, "heavy", torch.bfloat16).to(device)[128:, 256:]
    codes = torch.zeros(388, 304, dtype=torch.uint8, device=device)
    scales, sums = torch.zeros(4, 5, device=device), torch.zeros(2, 2, 3, device=device)
    inside = codes[128:384, 32:288].view(torch.float8_e4m3fn)
    together = Together()
    assert together.add(weight, inside, scales[1:3, 1:3], "fp32", sums)
    together.run()
    expected = reference.quantize_weight(weight.cpu(), "fp32")
    assert same(inside, expected[0])
    assert same(scales[1:3, 1:3], expected[1])
    inside.view(torch.uint8).zero_()
    scales[1:3, 1:3] = 0
    assert not codes.any()
    assert not scales.any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_shows_in_its_own_block(device: str) -> None:
    weights = [cases.awkward(256, 128, "normal", torch.bfloat16).to(device) for _ in range(2)]
    weights[1][130, 3] = float("nan")
    together, found = Together(), [destination(weight) for weight in weights]
    for weight, (codes, scales, sums) in zip(weights, found, strict=True):
        together.add(weight, codes, scales, "fp32", sums)
    together.run()
    assert [sums[..., 2].tolist() for _, _, sums in found] == [[[0.0], [0.0]], [[0.0], [1.0]]]


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(128, 100),
        torch.zeros(0, 128),
        torch.zeros(128, 256).T[:128],
        torch.zeros(128, 128 + 8)[:, :128],
        torch.zeros(128 * 128 + 1)[1:].view(128, 128),
        torch.zeros(128, 128, dtype=torch.float64),
    ],
    ids=["columns", "empty", "transposed", "distance", "address", "dtype"],
)
def test_what_can_not_go_with_others(device: str, weight: Tensor) -> None:
    moved = weight if device == "cpu" else torch.zeros_like(weight, device=device)
    if device != "cpu" and weight.storage_offset():
        moved = torch.zeros(128 * 128 + 1, device=device)[1:].view(128, 128)
    together = Together()
    codes, scales, sums = destination(torch.zeros(weight.shape, device=device))
    assert not together.add(moved, codes, scales, "fp32", sums)
    together.run()
    assert scales.isnan().all()
