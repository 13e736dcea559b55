# SPDX-License-Identifier: Apache-2.0
"""Slices in any order against whole tensors: every rank holds the same bytes."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from update.staging import stage
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.serve.client import changed_slices
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec, scale_name
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.contract.shard_slice import ShardSlice, piece_within
from vllm_fp8ext.update.contract.tensor_slices import Box, extents, slice_name, tensor_of
from vllm_fp8ext.update.worker.checksums import Checksums
from vllm_fp8ext.update.worker.chunk_intake import ChunkIntake
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.stager import Stager
from vllm_fp8ext.update.worker.staging_steps import StagingInput
from vllm_fp8ext.update.worker.tied_tensors import TiedTensors
from vllm_fp8ext.update.worker.verdicts import VerdictTable

BF16 = torch.bfloat16
SHAPES = {
    "gate": (400, 96),
    "up": (400, 96),
    "down": (200, 320),
    "norm": (96,),
    "embed": (130, 96),
    "stack": (3, 200, 96),
}
"""Of two ranks: `gate` and `up` are rows of one parameter, `down` is parted by columns, `stack` by transposed experts."""
FUSED, HALF, COLUMNS = 400, 200, 160


def piece(
    rank: int, target: str, shape: tuple[int, ...], source: Box, origin: tuple[int, ...], **more: bool
) -> ShardSlice:
    kind = {"quantized": True, "transposed": False, **more}
    return ShardSlice(rank, target, shape, source, origin, kind["quantized"], "bfloat16", kind["transposed"])


def pieces_of(rank: int) -> dict[str, tuple[ShardSlice, ...]]:
    rows, columns = (HALF * rank, HALF * (rank + 1)), (COLUMNS * rank, COLUMNS * (rank + 1))
    return {
        "gate": (piece(rank, "gate_up", (FUSED, 96), (rows, (0, 96)), (0, 0)),),
        "up": (piece(rank, "gate_up", (FUSED, 96), (rows, (0, 96)), (HALF, 0)),),
        "down": (piece(rank, "down", (200, COLUMNS), ((0, 200), columns), (0, 0)),),
        "norm": (piece(rank, "norm", (96,), ((0, 96),), (0,), quantized=False),),
        "embed": (piece(rank, "embed", (65, 96), ((65 * rank, 65 * (rank + 1)), (0, 96)), (0, 0), quantized=False),),
        "stack": tuple(
            piece(rank, f"expert{n}", (96, 200), ((n, n + 1), (0, 200), (0, 96)), (0, 0), transposed=True)
            for n in range(3)
        ),
    }  # fmt: skip


class Rank:
    """What one rank would serve, full of what a forgotten element would show."""

    def __init__(self, rank: int) -> None:
        shapes = {
            "gate_up": (FUSED, 96),
            "down": (200, COLUMNS),
            **{f"expert{n}": (96, 200) for n in range(3)},
        }
        self.quantized = {}
        for name, shape in shapes.items():
            codes, scales = quantize_weight.empty_like(torch.empty(shape))
            codes.view(torch.uint8).fill_(0x7F)
            self.quantized[name] = QuantizedTarget(codes, scales.fill_(float("nan")), BF16, "fp32")
        self.plain = {
            "norm": torch.full((96,), float("nan"), dtype=BF16),
            "embed": torch.full((65, 96), float("nan"), dtype=BF16),
        }
        self.stager = Stager(pieces_of(rank), self.quantized, self.plain)

    def contents(self) -> dict[str, bytes]:
        tensors = {name: target.codes for name, target in self.quantized.items()}
        tensors |= {f"{name} scales": target.scales for name, target in self.quantized.items()}
        return {
            name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
            for name, tensor in (tensors | self.plain).items()
        }


WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(BF16)
    for n, (name, shape) in enumerate(SHAPES.items())
}
MANIFEST = Manifest(
    {name: TensorSpec(name, shape, "bfloat16") for name, shape in SHAPES.items()},
    frozenset(),
    {name: pieces_of(0)[name] + pieces_of(1)[name] for name in SHAPES},
    "fp32",
    2,
)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, bytes]]:
    """What both ranks hold of whole tensors."""
    ranks = [Rank(0), Rank(1)]
    for rank, (name, weight) in product(ranks, WEIGHTS.items()):
        stage(rank.stager, name, weight)
    return [rank.contents() for rank in ranks]


def cut(data: st.DataObject, size: int, among: list[int] | None = None) -> list[tuple[int, int]]:
    """Draw ranges that cover `size` indices; `among`: where they may be cut."""
    places = st.sampled_from(among) if among else st.integers(1, size - 1)
    inner = data.draw(st.sets(places, max_size=3)) if size > 1 else set()
    return list(pairwise([0, *sorted(inner), size]))


def part_of(name: str, box: Box) -> Tensor:
    return WEIGHTS[name][tuple(slice(*side) for side in box)]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_slices_in_any_order_make_what_whole_tensors_make(
    expected: list[dict[str, bytes]], data: st.DataObject
) -> None:
    """Rows are cut anywhere, columns of quantized tensors where ranks part, and experts with their columns, which are rows of
    the parameters."""
    boxes: list[tuple[str, Box]] = []
    for name, shape in SHAPES.items():
        columns = cut(data, shape[-1], [COLUMNS]) if name == "down" else [(0, shape[-1])]
        if name == "embed":
            columns = cut(data, shape[-1])
        if name == "stack":
            sides = [cut(data, 3), [(0, 200)], cut(data, 96)]
        else:
            sides = [cut(data, shape[0]), *([columns] if len(shape) > 1 else [])]
        boxes += [(name, box) for box in product(*sides)]
    ranks = [Rank(0), Rank(1)]
    for name, box in data.draw(st.permutations(boxes)):
        sliced = slice_name(name, box)
        assert MANIFEST.problems([TensorSpec(sliced, extents(box), "bfloat16")]) == []
        for rank in ranks:
            if rank.stager.serves(sliced):
                stage(rank.stager, sliced, part_of(name, box))
    assert [rank.contents() for rank in ranks] == expected


def test_a_slice_may_come_again(expected: list[dict[str, bytes]]) -> None:
    rank = Rank(0)
    for name, weight in WEIGHTS.items():
        if name not in ("gate", "up"):
            stage(rank.stager, name, weight)
    boxes = [("gate", ((0, 90), (0, 96))), ("up", ((0, 150), (0, 96))), ("up", ((150, 400), (0, 96)))]
    for name, box in boxes:
        stage(rank.stager, slice_name(name, box), torch.full_like(part_of(name, box), 5.0))
    for name, box in [*boxes, ("gate", ((90, 400), (0, 96)))]:
        stage(rank.stager, slice_name(name, box), part_of(name, box))
    assert rank.contents() == expected[0]


def test_a_rank_reads_only_what_it_serves() -> None:
    names = ["gate[0:200,0:96]", "gate[200:400,0:96]", "gate[150:250,0:96]", "norm[0:96]", "stranger[0:1]"]
    stored = [StoredTensor(TensorSpec(name, (1, 96), "bfloat16"), n, 192) for n, name in enumerate(names)]
    read = []
    for number in range(2):
        stager = Rank(number).stager
        chunk = ChunkIntake(stager, Checksums({}), stored, torch.device("cpu"), TiedTensors({}), frozenset())
        read.append([tensor.spec.name for tensor in chunk.ordered()])
    assert read == [[names[0], names[2], names[3]], [names[1], names[2], names[3]]]


def test_codes_and_scales_of_a_slice_are_copied() -> None:
    weight = torch.randn(384, 128, generator=torch.Generator().manual_seed(7)).to(BF16)
    codes, scales = reference.quantize_weight(weight, "fp32")
    staged = QuantizedTarget(*quantize_weight.empty_like(torch.empty(256, 128)), BF16, "fp32")
    pieces = {"w": (piece(1, "t", (256, 128), ((128, 384), (0, 128)), (0, 0)),)}
    stager = Stager(pieces, {"t": staged}, {})
    for top, bottom in ((256, 384), (128, 256)):
        name = slice_name("w", ((top, bottom), (0, 128)))
        assert scale_name(name).endswith("]_scale_inv")
        rows = StagingInput(name, codes[top:bottom], 0, scales[top // 128 : bottom // 128])
        stager.stage(rows, VerdictTable())
    assert torch.equal(staged.codes.view(torch.uint8), codes[128:].view(torch.uint8))
    assert torch.equal(staged.scales, scales[1:])


def test_the_part_of_a_piece_in_a_slice() -> None:
    whole = piece(0, "t", (96, 200), ((1, 2), (0, 200), (10, 90)), (8, 0), transposed=True)
    part = piece_within(whole, ((0, 3), (0, 200), (20, 40)))
    assert part is not None
    assert (part.source, part.origin, part.extents) == (((1, 2), (0, 200), (0, 20)), (18, 0), (20, 200))
    assert piece_within(whole, ((2, 3), (0, 200), (20, 40))) is None


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_changed_slices_on_top_of_what_is_served_make_what_all_of_it_makes(data: st.DataObject) -> None:
    """And nothing is sent where nothing has changed."""
    after = {name: weight.clone() for name, weight in WEIGHTS.items()}
    changed = data.draw(st.lists(st.sampled_from(sorted(SHAPES)), max_size=4))
    for name in changed:
        at = tuple(data.draw(st.integers(0, size - 1)) for size in SHAPES[name])
        after[name][at] = data.draw(st.sampled_from((0.0, 9.0, -1e-3)))
    slices = changed_slices(MANIFEST.as_dict(), WEIGHTS, after)
    really = {name for name in SHAPES if not torch.equal(after[name], WEIGHTS[name])}
    assert really <= {tensor_of(name) for name in slices} <= really | ({"gate", "up"} if really else set())
    assert (
        MANIFEST.problems(TensorSpec(name, tuple(part.shape), "bfloat16") for name, part in slices.items())
        == []
    )
    assert MANIFEST.lacking_in_blocks(slices) == []
    ranks, expected = [Rank(0), Rank(1)], [Rank(0), Rank(1)]
    for number in range(2):
        for name, weight in WEIGHTS.items():
            stage(ranks[number].stager, name, weight)
            stage(expected[number].stager, name, after[name])
        ranks[number].stager.reset()
        for name in data.draw(st.permutations(sorted(slices))):
            if ranks[number].stager.serves(name):
                stage(ranks[number].stager, name, slices[name])
    assert [rank.contents() for rank in ranks] == [rank.contents() for rank in expected]


@pytest.mark.parametrize("codes", [False, True])
def test_blocks_of_some_columns_are_written_alone(codes: bool) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(7)).to(BF16)
    new = weight.clone()
    new[130, 200] = 7.0
    staged = QuantizedTarget(*quantize_weight.empty_like(weight), BF16, "fp32")
    stager = Stager({"w": (piece(0, "t", (256, 384), ((0, 256), (0, 384)), (0, 0)),)}, {"t": staged}, {})
    stage(stager, "w", weight)
    box = ((128, 256), (128, 256))
    part = new[128:256, 128:256]
    if codes:
        parts = reference.quantize_weight(part, "fp32")
        stage(stager, slice_name("w", box), parts[0], 0, parts[1])
    else:
        stage(stager, slice_name("w", box), part)
    expected_codes, expected_scales = reference.quantize_weight(new, "fp32")
    assert torch.equal(staged.codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(staged.scales, expected_scales)


def test_what_lacks_for_whole_blocks_is_named() -> None:
    """Rows 128 to 256 of the fused parameter of rank 0 are the last 72 of `gate` and the first 56 of `up`."""
    assert MANIFEST.lacking_in_blocks(["gate[0:128,0:96]"]) == []
    assert MANIFEST.lacking_in_blocks(["gate[128:200,0:96]"]) == ["up[0:56,0:96]"]
    assert MANIFEST.lacking_in_blocks(["gate[128:200,0:96]", "up[0:56,0:96]"]) == []
    assert MANIFEST.lacking_in_blocks(["gate[150:160,0:96]"]) == ["gate[128:200,0:96]", "up[0:56,0:96]"]
    assert (
        MANIFEST.lacking_in_blocks(["up[56:200,0:96]", "down[0:128,160:320]", "norm", "embed[3:4,0:96]"])
        == []
    )
    assert MANIFEST.lacking_in_blocks(["down[0:128,0:160]", "down[128:200,0:160]"]) == []
    assert MANIFEST.lacking_in_blocks(["down[0:129,0:160]"]) == ["down[128:200,0:160]"]


def test_what_is_no_version_of_the_served_weights_is_refused() -> None:
    shown = MANIFEST.as_dict()
    with pytest.raises(ValueError, match="tensor norm: expected none as before"):
        changed_slices(shown, {}, {"norm": WEIGHTS["norm"]})
    with pytest.raises(ValueError, match=r"expected torch.bfloat16 .96. as before, found torch.float32"):
        changed_slices(shown, WEIGHTS, {"norm": WEIGHTS["norm"].float()})
    stranger = {"stranger": torch.ones(2)}
    with pytest.raises(ValueError, match="tensor stranger: expected one of the manifest's"):
        changed_slices(shown, stranger, stranger)


def test_an_output_layer_that_is_the_embedding_is_sent_where_either_changed() -> None:
    """The server compares both: what differs in one of them is refused there, and not lost here."""
    shown = replace(MANIFEST, tied={"head": "embed"}).as_dict()
    old, new = WEIGHTS["embed"], WEIGHTS["embed"] + 1
    assert changed_slices(shown, {"head": old, "embed": old}, {"head": old, "embed": old}) == {}
    assert set(changed_slices(shown, {"head": old}, {"head": new})) == {"head"}
    before = {"head": old, "embed": old}
    for after in ({"head": new, "embed": new}, {"head": new, "embed": old}, {"head": old, "embed": new}):
        sent = changed_slices(shown, before, after)
        assert sent.keys() == after.keys()
        assert all(sent[name] is after[name] for name in after)


def test_two_names_of_one_tensor_are_refused() -> None:
    shown = replace(MANIFEST, aliases={"other": "norm"}).as_dict()
    twice = {"norm": WEIGHTS["norm"], "other": WEIGHTS["norm"]}
    with pytest.raises(ValueError, match="tensor other: expected each tensor once, found norm"):
        changed_slices(shown, twice, twice)
