# SPDX-License-Identifier: Apache-2.0
"""Staging in pieces against quantizing the whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from update.staging import stage
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, NonFiniteError, ScaleFormat
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.stager import Stager
from vllm_fp8ext.update.worker.staging_steps import StagingInput
from vllm_fp8ext.update.worker.verdicts import ScaleError, VerdictTable

BF16 = torch.bfloat16


def random(rows: int, columns: int, seed: int) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=noise) * torch.rand(rows, 1, generator=noise)


def target(
    rows: int, columns: int, scale_format: ScaleFormat = "fp32", dtype: torch.dtype = BF16
) -> QuantizedTarget:
    """A destination full of what a forgotten element would show."""
    codes, scales = quantize_weight.empty_like(torch.empty(rows, columns))
    codes.view(torch.uint8).fill_(0x7F)
    return QuantizedTarget(codes, scales.fill_(float("nan")), dtype, scale_format)


def holds(staged: QuantizedTarget, weight: Tensor) -> bool:
    """Whether codes and scales are, bit for bit, those of the whole weight."""
    codes, scales = reference.quantize_weight(weight.to(staged.dtype), staged.scale_format)
    same_codes = torch.equal(staged.codes.view(torch.uint8), codes.view(torch.uint8))
    return same_codes and torch.equal(staged.scales.view(torch.uint8), scales.view(torch.uint8))


def write(staged: QuantizedTarget, first: int, source: Tensor) -> tuple[float, float]:
    """Stage a tensor that is the rows of a parameter from `first` on."""
    sides = tuple((0, size) for size in source.shape)
    stager = Stager({"w": (piece("t", tuple(staged.codes.shape), sides, (first, 0)),)}, {"t": staged}, {})
    return stage(stager, "w", source).only()


def piece(
    name: str, shape: tuple[int, ...], source: tuple[tuple[int, int], ...], origin: tuple[int, ...]
) -> ShardSlice:
    return ShardSlice(0, name, shape, source, origin, len(shape) == 2, "bfloat16")


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Row ranges that cover a parameter, of any sizes, and the parameter's columns."""
    sizes = draw(st.lists(st.one_of(st.integers(1, 40), st.integers(90, 300)), min_size=1, max_size=6))
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    return list(pairwise(bounds)), draw(st.sampled_from((1, 5, 127, 129, 260)))


@given(
    partitions(),
    st.data(),
    st.sampled_from(("fp32", "pow2")),
    st.sampled_from((torch.bfloat16, torch.float16)),
    st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
)
@settings(max_examples=80)
def test_any_pieces_in_any_order_make_the_whole(
    partition: tuple[list[tuple[int, int]], int],
    data: st.DataObject,
    scale_format: ScaleFormat,
    served: torch.dtype,
    sent: torch.dtype,
) -> None:
    """Some pieces come twice, with other values first: only the last values of each count."""
    ranges, columns = partition
    rows = ranges[-1][1]
    weight = random(rows, columns, data.draw(st.integers(0, 2**32 - 1))).to(sent)
    staged = target(rows, columns, scale_format, served)
    stager = Stager(
        {
            f"part{index}": (piece("fused", (rows, columns), ((0, stop - start), (0, columns)), (start, 0)),)
            for index, (start, stop) in enumerate(ranges)
        },
        {"fused": staged},
        {},
    )
    indexes = range(len(ranges))
    wrong = data.draw(st.lists(st.sampled_from(indexes), max_size=4), label="sent with other values first")
    last = data.draw(st.permutations(indexes), label="order")
    garbage = random(rows, columns, 99).to(sent) * 50
    # an early piece may come anywhere before its final version
    order = [(index, True) for index in last]
    for index in wrong:
        order.insert(data.draw(st.integers(0, order.index((index, True)))), (index, False))
    for index, final in order:
        start, stop = ranges[index]
        stage(stager, f"part{index}", (weight if final else garbage)[start:stop])
    assert holds(staged, weight)


@given(partitions(), st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=80)
def test_sums_of_all_pieces_are_those_of_the_whole(
    partition: tuple[list[tuple[int, int]], int], data: st.DataObject, seed: int
) -> None:
    """Each row counts once, when its block is final."""
    ranges, columns = partition
    weight = random(ranges[-1][1], columns, seed).bfloat16()
    staged = target(*weight.shape)
    order = data.draw(st.permutations(ranges))
    sums = torch.tensor([write(staged, start, weight[start:stop]) for start, stop in order]).sum(0)
    whole = quantize_weight.quantize_weight(weight, *quantize_weight.empty_like(weight), "fp32")
    assert sums.tolist() == pytest.approx(list(whole), rel=1e-4, abs=1e-12)


@given(partitions(), st.data(), st.sampled_from((float("nan"), float("inf"), -float("inf"))))
@settings(max_examples=60)
def test_a_non_finite_value_is_refused_by_the_call_that_brings_it(
    partition: tuple[list[tuple[int, int]], int], data: st.DataObject, value: float
) -> None:
    """In a whole block or in a strip that still waits for other rows; and sending the piece again repairs
    it."""
    ranges, columns = partition
    weight = random(ranges[-1][1], columns, 3).bfloat16()
    bad = weight.clone()
    row = data.draw(st.integers(0, weight.shape[0] - 1))
    bad[row, data.draw(st.integers(0, columns - 1))] = value
    staged = target(*weight.shape)
    for start, stop in ranges:
        if start <= row < stop:
            with pytest.raises(NonFiniteError):
                write(staged, start, bad[start:stop])
        else:
            write(staged, start, bad[start:stop])
    for start, stop in ranges:
        if start <= row < stop:
            write(staged, start, weight[start:stop])
    assert holds(staged, weight)


@pytest.mark.parametrize("rows", [slice(0, 256), slice(0, 40)], ids=["whole blocks", "strip"])
def test_a_value_beyond_the_served_dtype_is_refused_in_a_quantized_layer(rows: slice) -> None:
    weight = torch.ones(300, 8)
    weight[30, 3] = 70_000.0
    staged = target(300, 8, dtype=torch.float16)
    with pytest.raises(NonFiniteError):
        write(staged, 0, weight[rows])


def test_a_value_beyond_the_served_dtype_is_refused_in_a_plain_parameter() -> None:
    """70,000 is finite in fp32, and infinite once it is served in FP16."""
    norm = torch.zeros(4, dtype=torch.float16)
    stager = Stager({"norm": (piece("norm", (4,), ((0, 4),), (0,)),)}, {}, {"norm": norm})
    with pytest.raises(NonFiniteError):
        stage(stager, "norm", torch.tensor([1.0, 2.0, 70_000.0, 3.0])).only()


def test_reset_forgets_half_filled_strips() -> None:
    """Rows of an update that was given up must not complete a block of the next one."""
    old, new = random(BLOCK, 20, 1).bfloat16(), random(BLOCK, 20, 2).bfloat16()
    staged = target(BLOCK, 20)
    stager = Stager(
        {
            "top": (piece("fused", (BLOCK, 20), ((0, 50), (0, 20)), (0, 0)),),
            "bottom": (piece("fused", (BLOCK, 20), ((0, 78), (0, 20)), (50, 0)),),
        },
        {"fused": staged},
        {},
    )
    stage(stager, "top", old[:50])
    stager.reset()
    assert stage(stager, "bottom", new[50:]).only() == (0.0, 0.0)
    assert (staged.codes.view(torch.uint8) == 0x7F).all()
    stage(stager, "top", new[:50])
    assert holds(staged, new)


def test_plain_targets_are_copied_where_the_piece_lies() -> None:
    """A shard of the columns into padded rows; what the piece does not fill stays."""
    embedding = torch.full((8, 3), -1.0, dtype=BF16)
    source = torch.arange(30.0).view(5, 6)
    stager = Stager({"embed": (piece("embed", (8, 3), ((1, 5), (3, 6)), (2, 0)),)}, {}, {"embed": embedding})
    assert stage(stager, "embed", source).only() == (0.0, 0.0)
    expected = torch.full((8, 3), -1.0, dtype=BF16)
    expected[2:6] = source[1:5, 3:6].bfloat16()
    assert torch.equal(embedding, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_of_a_plain_parameter_are_told(value: float) -> None:
    norm = torch.zeros(4, dtype=BF16)
    stager = Stager({"norm": (piece("norm", (4,), ((0, 4),), (0,)),)}, {}, {"norm": norm})
    with pytest.raises(NonFiniteError):
        stage(stager, "norm", torch.tensor([1.0, value, 2.0, 3.0])).only()
    assert stage(stager, "norm", torch.arange(4.0)).only() == (0.0, 0.0)
    assert norm.tolist() == [0, 1, 2, 3]


def test_only_the_served_part_is_read() -> None:
    """What another rank serves may hold anything."""
    weight = random(200, 64, 5).bfloat16()
    staged = target(200, 32)
    stager = Stager({"down": (piece("down", (200, 32), ((0, 200), (32, 64)), (0, 0)),)}, {"down": staged}, {})
    sent = weight.clone()
    sent[:, :32] = float("nan")
    stage(stager, "down", sent)
    assert holds(staged, weight[:, 32:])


def test_one_tensor_may_fill_several_parameters() -> None:
    """A name with several pieces (a projection that is fused in the checkpoint, too) fills all of them, plain
    ones too."""
    weight = random(300, 16, 6).bfloat16()
    first, second, plain = target(140, 16), target(100, 16), torch.zeros(60, 16, dtype=BF16)
    stager = Stager(
        {
            "all": (
                piece("second", (100, 16), ((140, 240), (0, 16)), (0, 0)),
                piece("first", (140, 16), ((0, 140), (0, 16)), (0, 0)),
                piece("plain", (60, 16), ((240, 300), (0, 16)), (0, 0)),
            )
        },
        {"first": first, "second": second},
        {"plain": plain},
    )
    error, norm = stage(stager, "all", weight).only()
    assert holds(first, weight[:140])
    assert holds(second, weight[140:240])
    assert torch.equal(plain, weight[240:])
    assert norm == pytest.approx(weight[:240].double().square().sum().item(), rel=1e-5)
    assert 0 < error < norm


# --- tensors that come quantized


@pytest.mark.parametrize("form", ["fp32", "pow2"])
def test_codes_and_scales_are_served_as_they_are(form: ScaleFormat) -> None:
    """The lower right quarter of a weight, as a shard that begins behind another tensor's rows."""
    weight = random(512, 384, 0).to(BF16)
    whole = target(384, 256, form)
    stager = Stager(
        {"w": (ShardSlice(0, "t", (384, 256), ((256, 512), (128, 384)), (128, 0), True, "bfloat16"),)},
        {"t": whole},
        {},
    )
    write(whole, 0, weight[:128, :256])
    codes, scales = reference.quantize_weight(weight, form)
    stage(stager, "w", codes, scales=scales).only()
    assert holds(whole, torch.cat([weight[:128, :256], weight[256:, 128:]]))


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (
            lambda codes, scales: codes.view(torch.uint8)[200, 7].fill_(0x7F),
            NonFiniteError,
            "NaN or infinity",
        ),
        (lambda codes, scales: codes.view(torch.uint8)[0, 0].fill_(0xFF), NonFiniteError, "NaN or infinity"),
        (lambda codes, scales: scales[1, 0].fill_(torch.inf), NonFiniteError, "NaN or infinity"),
        (lambda codes, scales: scales[0, 0].fill_(0), ScaleError, "positive scales"),
        (lambda codes, scales: scales[0, 1].neg_(), ScaleError, "positive scales"),
        (lambda codes, scales: scales[1, 1].mul_(1.5), ScaleError, "powers of two"),
    ],
)
def test_codes_that_can_not_be_served(spoil, error: type[Exception], match: str) -> None:
    codes, scales = reference.quantize_weight(random(256, 256, 1), "pow2")
    whole = target(256, 256, "pow2")
    stager = Stager({"w": (piece("t", (256, 256), ((0, 256), (0, 256)), (0, 0)),)}, {"t": whole}, {})
    stage(stager, "w", codes, scales=scales).only()
    spoil(codes, scales)
    with pytest.raises(error, match=match):
        stage(stager, "w", codes, scales=scales).only()


# --- tensors that come as rows


def cuts(data: st.DataObject, rows: int, unit: int = 1) -> list[tuple[int, int]]:
    """Ranges of rows that make the whole, in order."""
    result = data.draw(st.sets(st.integers(1, max(1, (rows - 1) // unit)), max_size=6), label="cuts")
    inner = sorted(cut * unit for cut in result if cut * unit < rows)
    return list(pairwise([0, *inner, rows]))


def stage_rows(
    stager: Stager, name: str, weight: Tensor, ranges: list[tuple[int, int]]
) -> tuple[float, float]:
    table = VerdictTable()
    for start, stop in ranges:
        rows = weight[start:stop].clone()
        stager.stage(StagingInput(name, rows, start), table)
        rows.fill_(99)  # what was staged does not need them any more
    return table.only()


@given(partitions(), st.data(), st.sampled_from((torch.bfloat16, torch.float32)))
@settings(max_examples=80)
def test_any_rows_of_any_pieces_make_the_whole(
    partition: tuple[list[tuple[int, int]], int], data: st.DataObject, sent: torch.dtype
) -> None:
    """Tensors of a fused parameter, each a shard of a larger one, each cut anywhere; some come twice, cut otherwise, with
    other values first or with its first rows alone."""
    ranges, columns = partition
    rows = ranges[-1][1]
    weight = random(rows, columns, data.draw(st.integers(0, 2**32 - 1))).to(sent)
    staged = target(rows, columns)
    above = data.draw(st.integers(0, 200), label="rows of other ranks above")
    pieces, tensors = {}, {}
    for index, (start, stop) in enumerate(ranges):
        source = ((above, above + stop - start), (0, columns))
        pieces[index] = (piece("fused", (rows, columns), source, (start, 0)),)
        others = [torch.full((size, columns), 7.0, dtype=sent) for size in (above, 30)]
        tensors[index] = torch.cat([others[0], weight[start:stop], others[1]])
    stager = Stager({f"part{index}": parts for index, parts in pieces.items()}, {"fused": staged}, {})
    norm = error = 0.0
    for index in data.draw(st.permutations(range(len(ranges))), label="order"):
        tensor, name = tensors[index], f"part{index}"
        if data.draw(st.booleans(), label="garbage first"):
            garbage = random(*tensor.shape, 99).to(sent) * 50
            begun = cuts(data, len(tensor))
            stage_rows(stager, name, garbage, begun[: data.draw(st.integers(1, len(begun)))])
        sums = stage_rows(stager, name, tensor, cuts(data, len(tensor)))
        error, norm = error + sums[0], norm + sums[1]
    assert holds(staged, weight)
    whole = quantize_weight.quantize_weight(weight.bfloat16(), *quantize_weight.empty_like(weight), "fp32")
    assert (error, norm) == pytest.approx(whole, rel=1e-4, abs=1e-12)


@given(st.data())
@settings(max_examples=40)
def test_any_rows_of_a_plain_parameter_make_the_whole(data: st.DataObject) -> None:
    embedding = torch.full((40, 3), -1.0, dtype=BF16)
    source = torch.arange(180.0).view(30, 6)
    stager = Stager({"e": (piece("e", (40, 3), ((4, 25), (3, 6)), (2, 0)),)}, {}, {"e": embedding})
    assert stage_rows(stager, "e", source, cuts(data, 30)) == (0.0, 0.0)
    expected = torch.full((40, 3), -1.0, dtype=BF16)
    expected[2:23] = source[4:25, 3:6].bfloat16()
    assert torch.equal(embedding, expected)


def test_a_scalar_is_staged() -> None:
    scalar = torch.zeros((), dtype=BF16)
    stager = Stager({"s": (piece("s", (), (), ()),)}, {}, {"s": scalar})
    stage(stager, "s", torch.tensor(2.5)).only()
    assert scalar == 2.5


@given(st.data())
@settings(max_examples=40)
def test_blocks_of_codes_make_the_whole(data: st.DataObject) -> None:
    """A shard from the middle on, behind other rows, whose last block is not full."""
    weight = random(700, 256, 0).to(BF16)
    whole = target(128 + 444, 128)
    source = ((256, 700), (128, 256))
    stager = Stager({"w": (piece("t", (572, 128), source, (128, 0)),)}, {"t": whole}, {})
    write(whole, 0, weight[:128, :128])
    codes, scales = reference.quantize_weight(weight, "fp32")
    table = VerdictTable()
    for start, stop in cuts(data, 700, BLOCK):
        stager.stage(StagingInput("w", codes[start:stop], start, scales), table)
    table.only()
    assert holds(whole, torch.cat([weight[:128, :128], weight[256:, 128:]]))


@given(st.data(), st.integers(0, 299))
@settings(max_examples=40)
def test_a_non_finite_value_in_any_rows_refuses_the_tensor(data: st.DataObject, row: int) -> None:
    weight = random(300, 20, 1).bfloat16()
    weight[row, 3] = torch.nan
    staged = target(360, 20)
    stager = Stager({"w": (piece("t", (360, 20), ((0, 300), (0, 20)), (60, 0)),)}, {"t": staged}, {})
    with pytest.raises(NonFiniteError):
        stage_rows(stager, "w", weight, cuts(data, 300))


def test_rows_that_come_again_do_not_count_until_all_have() -> None:
    """The block that another tensor completed before is quantized once more, and no mixture of old and new rows is."""
    weight, again = random(BLOCK, 20, 1).bfloat16(), random(BLOCK, 20, 2).bfloat16()
    staged = target(BLOCK, 20)
    stager = Stager(
        {
            "top": (piece("fused", (BLOCK, 20), ((0, 50), (0, 20)), (0, 0)),),
            "bottom": (piece("fused", (BLOCK, 20), ((0, 78), (0, 20)), (50, 0)),),
        },
        {"fused": staged},
        {},
    )
    stage(stager, "top", weight[:50])
    stage(stager, "bottom", weight[50:])
    assert stage(stager, "top", again[:30]).only() == (0.0, 0.0)
    assert holds(staged, weight)
    stage(stager, "top", again[30:50], 30)
    assert holds(staged, torch.cat([again[:50], weight[50:]]))


def test_blocks_of_one_tensor_alone_are_not_kept() -> None:
    """Cut in the middle of every block: only what waits for another tensor stays."""
    staged = target(1000, 8)
    stager = Stager({"w": (piece("t", (1000, 8), ((0, 940), (0, 8)), (60, 0)),)}, {"t": staged}, {})
    stage_rows(stager, "w", random(940, 8, 0), list(pairwise(range(0, 941, 94))))
    assert list(staged._strips) == [0]


# --- many tensors, one wait


def test_each_tensor_gets_its_own_verdict() -> None:
    """Of tensors that were staged together, quantized and plain and as codes, good and bad."""
    weights = {name: random(256, 130, seed).bfloat16() for seed, name in enumerate("abc")}
    weights["b"][200, 5] = torch.inf
    stager = Stager(
        {name: (piece(name, (256, 130), ((0, 256), (0, 130)), (0, 0)),) for name in "abcd"}
        | {name: (piece(name, (4,), ((0, 4),), (0,)),) for name in ("norm", "other")},
        {name: target(256, 130, "pow2") for name in "abcd"},
        {"norm": torch.zeros(4, dtype=BF16), "other": torch.zeros(4)},
    )
    table = VerdictTable()
    for name, weight in weights.items():
        stager.stage(StagingInput(name, weight), table)
    codes, scales = reference.quantize_weight(weights["a"], "fp32")
    stager.stage(StagingInput("d", codes, scales=scales), table)
    stager.stage(StagingInput("norm", torch.ones(4)), table)
    stager.stage(StagingInput("other", torch.tensor([1.0, torch.nan, 2.0, 3.0])), table)
    result = table.verdicts()
    for name in ("a", "c"):
        error, norm = result[name]
        assert 0 < error < norm
        assert norm == pytest.approx(weights[name].double().square().sum().item(), rel=1e-5)
    assert isinstance(result["b"], NonFiniteError)
    assert isinstance(result["d"], ScaleError)
    assert result["norm"] == (0.0, 0.0)
    assert isinstance(result["other"], NonFiniteError)


def test_nothing_staged_has_no_verdicts() -> None:
    assert VerdictTable().verdicts() == {}


def test_a_rehearsal_leaves_everything_as_it_is() -> None:
    first, second = target(256, 128), target(128, 128)
    plain = torch.full((4,), 3.0)
    parts = [part.view(torch.uint8) for staged in (first, second) for part in (staged.codes, staged.scales)]
    before = [part.clone() for part in (*parts, plain)]
    Stager({}, {"a": first, "b": second}, {"c": plain}).warm_up()
    assert all(torch.equal(*pair) for pair in zip(before, (*parts, plain), strict=True))
