# SPDX-License-Identifier: Apache-2.0
"""Names of slices, what they share, and what a manifest takes of them."""

from typing import Any

import pytest

from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec, scale_name
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.contract.tensor_slices import (
    TensorSlice,
    covers,
    overlapping,
    parsed_slice,
    slice_name,
    slices_to_send,
    tensor_of,
)

Extents = tuple[tuple[int, int], ...]


def piece(rank: int, source: Extents, shape: tuple[int, ...], **more: Any) -> ShardSlice:
    return ShardSlice(
        rank=rank,
        target="t",
        target_shape=shape,
        source=source,
        origin=(0,) * len(shape),
        **{"quantized": True, "dtype": "bfloat16", **more},
    )


ROWS = (piece(0, ((0, 256), (0, 384)), (256, 384)), piece(1, ((256, 512), (0, 384)), (256, 384)))
COLUMNS = (piece(0, ((0, 256), (0, 192)), (256, 192)), piece(1, ((0, 256), (192, 384)), (256, 192)))
NORM = tuple(piece(rank, ((0, 256),), (256,), quantized=False) for rank in range(2))
EXPERTS = tuple(
    ShardSlice(
        rank, f"e{expert}", (128, 256), ((expert, expert + 1), (0, 128), (0, 256)), (0, 0), True, "bfloat16"
    )
    for rank, expert in ((0, 0), (0, 1), (1, 2), (1, 3))
)
MANIFEST = Manifest(
    {
        "up": TensorSpec("up", (512, 384), "bfloat16"),
        "down": TensorSpec("down", (256, 384), "bfloat16"),
        "norm": TensorSpec("norm", (256,), "bfloat16"),
        "mlp.experts.gate_up_proj": TensorSpec("mlp.experts.gate_up_proj", (4, 128, 256), "bfloat16"),
        "embed": TensorSpec("embed", (512, 384), "bfloat16"),
    },
    frozenset({"rotary"}),
    {"up": ROWS, "down": COLUMNS, "norm": NORM, "mlp.experts.gate_up_proj": EXPERTS, "embed": ROWS},
    "fp32",
    2,
    tied={"head": "embed"},
    aliases={"model.up": "up"},
)


def spec(name: str, shape: tuple[int, ...] | None = None, dtype: str = "bfloat16") -> TensorSpec:
    part = parsed_slice(name)
    assert part
    return TensorSpec(name, shape or tuple(stop - start for start, stop in part.box), dtype)


def problems(name: str, shape: tuple[int, ...] | None = None, **more: Any) -> list[tuple[Any, ...]]:
    result = MANIFEST.problems([spec(name, shape)], **more)
    return [(each["kind"], each["tensor"], each.get("expected"), each.get("found")) for each in result]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("w[0:1]", TensorSlice("w", ((0, 1),))),
        ("a.b[0:256,128:512]", TensorSlice("a.b", ((0, 256), (128, 512)))),
        ("a[0:1][2:3]", TensorSlice("a[0:1]", ((2, 3),))),
        ("w", None),
        ("w[]", None),
        ("w[1]", None),
        ("w[0:1", None),
        ("w[-1:1]", None),
        ("w[00:1]", None),
        ("w[0: 1]", None),
        ("[0:1]", None),
        (scale_name("w[0:1]"), None),
    ],
)
def test_a_name_tells_the_box_of_a_slice(name: str, expected: TensorSlice | None) -> None:
    assert parsed_slice(name) == expected
    assert tensor_of(name) == (expected.tensor if expected else name)
    if expected:
        assert expected.name == slice_name(*expected) == name


@pytest.mark.parametrize(
    "name",
    ["up[0:256,0:384]", "up[3:129,0:384]", "down[0:256,0:192]", "down[7:9,192:384]", "down[0:128,0:128]", "down[0:1,0:384]", 
     "norm[5:6]",      "mlp.experts.gate_up_proj[1:3,0:128,0:256]", "mlp.experts.gate_up_proj[1:2,5:9,0:256]", "rotary[0:4]"],
)  # fmt: skip
def test_what_each_rank_can_stage_is_taken(name: str) -> None:
    assert problems(name) == []


@pytest.mark.parametrize(
    ("name", "expected", "sides"),
    [
        ("down[0:256,0:100]", "all of [0, 192] in dimension 1, which rank 0 serves, or whole blocks of it", [0, 100]),
        ("down[0:256,0:193]", "all of [192, 384] in dimension 1, which rank 1 serves, or whole blocks of it", [0, 193]),
        ("up[0:256,1:384]", "all of [0, 384] in dimension 1, which rank 0 serves, or whole blocks of it", [1, 384]),
        ("up[0:513,0:384]", "a box within [[0, 512], [0, 384]]", [[0, 513], [0, 384]]),
        ("up[0:512]", "a box within [[0, 512], [0, 384]]", [[0, 512]]),
        ("up[4:4,0:384]", "a box within [[0, 512], [0, 384]]", [[4, 4], [0, 384]]),
        (
            "mlp.experts.gate_up_proj[0:1,0:128,0:64]",
            "all of [0, 256] in dimension 2, which rank 0 serves, or whole blocks of it",
            [0, 64],
        ),
        ("embed[0:1,0:384]", "all of it (embed)", "a slice"),
        ("head[0:1,0:384]", "all of it (head)", "a slice"),
    ],
)  # fmt: skip
def test_a_bad_slice_is_refused_by_name(name: str, expected: str, sides: Any) -> None:
    assert problems(name) == [("wrong-slice", name, expected, sides)]


def test_other_faults_of_slices_are_those_of_tensors() -> None:
    assert problems("up[0:2,0:384]", (3, 384)) == [("wrong-shape", "up[0:2,0:384]", [2, 384], [3, 384])]
    assert problems("stranger[0:2]") == [("unknown-tensor", "stranger[0:2]", None, None)]
    wrong = MANIFEST.problems([spec("up[0:2,0:384]", dtype="int8")])
    assert [each["kind"] for each in wrong] == ["wrong-dtype"]
    name = "mlp.experts.gate_up_proj[0:1,0:128,0:256]"
    assert problems(name, expert_layout="in_out") == [("wrong-layout", name, "out_in", "in_out")]
    assert problems(name, expert_layout="out_in") == []


def test_codes_come_in_whole_blocks_with_their_scales() -> None:
    name = "up[128:256,0:384]"
    coded = spec(name, dtype="float8_e4m3fn")
    assert MANIFEST.takes_codes(name)
    assert not MANIFEST.takes_codes("up[1:256,0:384]")
    assert not MANIFEST.takes_codes("norm[0:128]")
    scales = MANIFEST.scales_among([coded])
    assert scales == {scale_name(name): TensorSpec(scale_name(name), (1, 3), "float32")}
    assert MANIFEST.problems([coded, *scales.values()]) == []
    assert [each["kind"] for each in MANIFEST.problems([coded])] == ["missing-scales"]


def test_a_slice_of_an_alias_is_one_of_the_tensor() -> None:
    assert MANIFEST.canonical("model.up[0:1,0:384]") == "up[0:1,0:384]"
    assert MANIFEST.canonical("down[0:1,0:384]") == "down[0:1,0:384]"


@pytest.mark.parametrize(
    ("boxes", "lacking"),
    [
        ({"up": [((0, 512), (0, 384))]}, []),
        ({"up": [((0, 100), (0, 384)), ((100, 512), (0, 384))]}, []),
        ({"up": [((0, 256), (0, 384))]}, ["up[256:512,0:384]"]),
        ({"up": [((0, 511), (0, 384))]}, ["up[256:512,0:384]"]),
        ({"down": [((0, 256), (192, 384))]}, ["down[0:256,0:192]"]),
        ({"norm": [((0, 256),)]}, []),
    ],
)
def test_a_tensor_has_come_when_all_that_is_served_of_it_has(
    boxes: dict[str, list[Extents]], lacking: list[str]
) -> None:
    [(name, theirs)] = boxes.items()
    assert MANIFEST.lacking(name, theirs) == lacking
    assert MANIFEST.covered(boxes) == ({name} if not lacking else set())


def test_what_slices_share_is_told() -> None:
    names = ["up[0:10,0:384]", "down[0:10,0:192]", "norm"]
    assert overlapping(names, names) == {}
    assert overlapping(names, ["up[9:20,0:384]"]) == {"up[0:10,0:384]": "up[9:20,0:384]"}
    assert overlapping(names, ["up[10:20,0:384]", "down[0:10,192:384]"]) == {}
    assert overlapping(names, ["up"]) == {"up[0:10,0:384]": "up"}
    assert overlapping(names, ["norm[0:1]"]) == {"norm": "norm[0:1]"}
    assert covers([((0, 4), (0, 2))], ((1, 3), (0, 2)))
    assert not covers([((0, 4), (0, 1))], ((1, 3), (0, 2)))


def test_slices_to_send_bring_everything_once() -> None:
    whole: Extents = ((0, 4), (0, 6))
    assert slices_to_send("w", (4, 6), [whole, whole]) == ["w"]
    assert slices_to_send("w", (4, 6), [((2, 4), (0, 6)), ((0, 2), (0, 6))]) == ["w[0:2,0:6]", "w[2:4,0:6]"]
    assert slices_to_send("w", (9, 6), [((0, 4), (0, 6)), ((2, 5), (0, 6))]) == ["w[0:5,0:6]"]
    chained: list[Extents] = [((0, 3),), ((4, 6),), ((2, 5),)]
    assert slices_to_send("w", (9,), chained) == ["w[0:6]"]


def test_the_manifest_of_a_rank_is_what_it_serves() -> None:
    shown = MANIFEST.as_dict(1)
    assert (shown["rank"], shown["world_size"], shown["scale_format"]) == (1, 2, "fp32")
    assert {name: entry["slices"] for name, entry in shown["tensors"].items()} == {
        "down": ["down[0:256,192:384]"],
        "embed": ["embed"],
        "mlp.experts.gate_up_proj": [
            "mlp.experts.gate_up_proj[2:3,0:128,0:256]",
            "mlp.experts.gate_up_proj[3:4,0:128,0:256]",
        ],
        "norm": ["norm"],
        "up": ["up[256:512,0:384]"],
    }
    assert all({piece["rank"] for piece in entry["pieces"]} == {1} for entry in shown["tensors"].values())
    whole = MANIFEST.as_dict()
    assert "slices" not in whole["tensors"]["up"]
    assert [shown["tensors"][name]["takes_codes"] for name in ("up", "norm")] == [True, False]
