# SPDX-License-Identifier: Apache-2.0
"""Rows of a grouped GEMM, and the weighted sum of what comes of them, against their references."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.moe.expert_rows import _COUNTED, CHUNK, capacity, expert_rows, expert_rows_reference
from vllm_fp8ext.kernels.moe.expert_sum import expert_sum, expert_sum_reference


def chosen(tokens: int, each: int, experts: int, kind: str, device: str) -> torch.Tensor:
    """Experts of each token, all different; `few`: the same for all; `remote`: half of them on another rank."""
    noise = torch.Generator().manual_seed(tokens)
    result = torch.rand(tokens, experts, generator=noise).argsort(1)[:, :each].int()
    if kind == "few":
        result[:] = result[:1]
    if kind == "remote":
        result[torch.rand(result.shape, generator=noise) < 0.5] = -1
    return result.to(device)


FEW = [(1, 2, 4), (37, 8, 60), (260, 3, 5)]
MANY = [(3, 8, 128), (5, 6, 160), (2, 8, 256)]
"""Of so many experts an interpreter takes seconds: each kind and each alignment once."""
KINDS = ["uniform", "few", "remote"]
ALIGNMENTS = [16, 1, 128]


PAIRS = tuple(zip(ALIGNMENTS, KINDS, strict=True))
"""`make test` has one of these for the first of MANY. The interpreter takes seconds for them."""

MORE = {shape: int(shape == MANY[0]) for shape in MANY}


@pytest.mark.parametrize(
    ("tokens", "each", "experts", "align", "kind"),
    [
        pytest.param(
            *(*shape, align, kind),
            marks=() if (align, kind) in PAIRS[: MORE.get(shape)] else pytest.mark.full,
        )
        for shape in (*FEW, *MANY)
        for align in ALIGNMENTS
        for kind in KINDS
        if shape in FEW or (align, kind) in PAIRS
    ],
)
def test_rows_are_the_references(
    tokens: int, each: int, experts: int, align: int, kind: str, device: str
) -> None:
    of = chosen(tokens, each, experts, kind, device)
    actual, expected = expert_rows(of, experts, align), expert_rows_reference(of, experts, align)
    used = int(expected.used)
    assert int(actual.used) == used <= capacity(of.numel(), experts, align)
    assert torch.equal(actual.slots[:used], expected.slots[:used])
    for name in ("owners", "places", "ends"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert actual._fields == expected._fields


@pytest.mark.parametrize("tokens", [CHUNK + 5, (_COUNTED + 1) * CHUNK // 2 + 1])
def test_several_chunks_are_counted_before(tokens: int, device: str) -> None:
    of = chosen(tokens, 2, 7, "uniform", device)
    actual, expected = expert_rows(of.long(), 7, 64), expert_rows_reference(of, 7, 64)
    for name in ("owners", "places", "ends", "used"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def test_capacity_is_reached_but_not_exceeded(device: str) -> None:
    of = torch.arange(8, device=device).view(4, 2)
    assert int(expert_rows(of, 8, 16).used) == capacity(8, 8, 16) == 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize(("tokens", "each", "width"), [(1, 8, 1040), (5, 3, 200)])
def test_the_sum_is_the_references(
    tokens: int, each: int, width: int, placed: bool, dtype: torch.dtype, device: str
) -> None:
    noise = torch.Generator().manual_seed(width)
    of = chosen(tokens, each, 16, "remote", device)
    rows = tokens * each
    parts = torch.randn(rows, width, generator=noise).to(dtype).to(device)
    weights = torch.rand(tokens, each, generator=noise).to(device)
    places = torch.randperm(rows, generator=noise).int().to(device) if placed else None
    if placed:
        places = torch.where(of.flatten() >= 0, places, -1)
    else:
        parts[of.flatten() < 0] = torch.nan  # is not read
    out = expert_sum(parts, places, weights, of, torch.bfloat16)
    expected = expert_sum_reference(parts.nan_to_num(), places, weights, of, torch.float32)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-5)
    assert torch.equal(out, expert_sum(parts, places, weights, of, torch.bfloat16))


def test_no_tokens(device: str) -> None:
    none = torch.empty(0, 2, dtype=torch.int32, device=device)
    assert not int(expert_rows(none, 4, 16).used)
    out = expert_sum(torch.empty(0, 64, device=device), None, none.float(), none, torch.bfloat16)
    assert out.shape == (0, 64)
