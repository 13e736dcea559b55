# SPDX-License-Identifier: Apache-2.0
"""Codes and block scales of many weights, copied in one launch."""

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.testing import hard_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.memory.copy_blocks import CopyBlocks
from vllm_fp8ext.kernels.quantize.quantize_weights_batched import Destination

SHAPES = ((128, 128), (256, 384), (130, 192))


def quantized(device: str, scale_format: reference.ScaleFormat = "fp32") -> list[tuple[Tensor, Tensor]]:
    weights = [hard_cases.awkward(*shape, "heavy", torch.bfloat16, seed) for seed, shape in enumerate(SHAPES)]
    result = [reference.quantize_weight(weight, scale_format) for weight in weights]
    return [(codes.to(device), scales.to(device)) for codes, scales in result]


def addresses(sent: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.tensor([[codes.data_ptr(), scales.data_ptr()] for codes, scales in sent])


def rooms(sent: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Larger than the codes, and full of something else."""
    shapes = [(len(codes) + 3, codes.shape[1] + 32) for codes, _ in sent]
    return [torch.full(shape, 0x55, dtype=torch.uint8, device=sent[0][0].device) for shape in shapes]


def places(sent: list[tuple[Tensor, Tensor]], within: list[Tensor] | None = None) -> list[Destination]:
    """Parts of larger codes and scales."""
    collected = []
    for (codes, scales), room in zip(sent, within or rooms(sent), strict=True):
        rows, columns = codes.shape
        beside = torch.full((len(scales) + 1, scales.shape[1] + 1), 7.0, device=codes.device)
        inside = room[:rows, :columns].view(torch.float8_e4m3fn)
        collected.append(Destination(inside, beside[: len(scales), : scales.shape[1]], columns))
    return collected


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_codes_and_scales_come_to_their_places_and_no_further(
    device: str, scale_format: reference.ScaleFormat
) -> None:
    sent = quantized(device, scale_format)
    within = rooms(sent)
    to = places(sent, within)
    copied = CopyBlocks(to, [scales.stride(0) for _, scales in sent], scale_format)
    for turn in (sent, [(codes.clone(), 2 * scales) for codes, scales in sent]):
        sizes: list[int] = []
        wrong = copied.queue(addresses(turn), sizes.append)
        assert not wrong.any()
        assert sizes == [sum(codes.numel() for codes, _ in sent)]
        for (codes, scales), place, room in zip(turn, to, within, strict=True):
            assert torch.equal(place.codes_NK.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(place.scales_NbKb, scales)
            assert (room[-3:] == 0x55).all()
            assert (room[:, -32:] == 0x55).all()


@pytest.mark.parametrize("value", [0x7F, 0xFF])
def test_a_code_that_is_no_number(device: str, value: int) -> None:
    sent = quantized(device)
    sent[2][0].view(torch.uint8)[129, 191] = value
    wrong = CopyBlocks(places(sent), [scales.stride(0) for _, scales in sent], "fp32").queue(addresses(sent))
    assert wrong.tolist() == [[0, 0], [0, 0], [1, 0]]


@pytest.mark.parametrize(
    ("value", "scale_format", "counts"),
    [
        (float("inf"), "fp32", [1, 0]),
        (float("nan"), "fp32", [1, 0]),
        (0.0, "fp32", [0, 1]),
        (-0.5, "fp32", [0, 1]),
        (0.75, "fp32", [0, 0]),
        (0.75, "pow2", [0, 1]),
        (2.0**-126, "pow2", [0, 0]),
        (2.0**-130, "pow2", [0, 0]),
        (3 * 2.0**-130, "pow2", [0, 1]),
    ],
)
def test_scales_that_can_not_be_served(
    device: str, value: float, scale_format: reference.ScaleFormat, counts: list[int]
) -> None:
    sent = quantized(device, scale_format)
    sent[1][1][1, 2] = value
    copied = CopyBlocks(places(sent), [scales.stride(0) for _, scales in sent], scale_format)
    assert copied.queue(addresses(sent)).tolist() == [[0, 0], counts, [0, 0]]
