# SPDX-License-Identifier: Apache-2.0
"""The manifest as JSON, of several ranks, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, DTYPES, Manifest, TensorSpec, merge
from vllm_fp8ext.update.contract.shard_slice import ShardSlice


def manifest(rank: int = 0, ignored: frozenset[str] = frozenset({"lm_head"})) -> Manifest:
    """One rank of two: half of a projection, and a norm that both serve."""
    tensors = {
        "q": TensorSpec("q", (256, 64), "bfloat16"),
        "norm": TensorSpec("norm", (64,), "float32"),
    }
    pieces = {
        "q": (
            ShardSlice(
                rank, "qkv", (192, 64), ((rank * 128, rank * 128 + 128), (0, 64)), (0, 0), True, "bfloat16"
            ),
        ),
        "norm": (ShardSlice(rank, "norm", (64,), ((0, 64),), (0,), False, "bfloat16"),),
    }
    return Manifest(tensors, ignored, pieces, "fp32", 1)


BOXES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple)
PIECES = st.builds(
    ShardSlice,
    rank=st.integers(0, 7),
    target=st.text(),
    target_shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    source=BOXES,
    origin=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    quantized=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(st.text(), unique=True, max_size=4))
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    tensors = {name: TensorSpec(name, draw(shapes), draw(st.sampled_from(DTYPES))) for name in names}
    pieces = {name: tuple(draw(st.lists(PIECES, max_size=2))) for name in names}
    ignored = draw(st.frozensets(st.text(), max_size=3))
    tied, aliases = (draw(st.dictionaries(st.text(), st.text(), max_size=2)) for _ in range(2))
    form, ranks = draw(st.sampled_from(("fp32", "pow2"))), draw(st.integers(1, 8))
    return Manifest(tensors, ignored, pieces, form, ranks, tied, aliases)


@given(manifests())
@settings(max_examples=60)
def test_a_manifest_survives_json(original: Manifest) -> None:
    again = Manifest.from_dict(json.loads(json.dumps(original.as_dict())))
    assert again == original
    assert list(again.tensors) == sorted(original.tensors)


def test_the_json_names_the_dtypes_that_may_be_sent() -> None:
    assert manifest().as_dict()["dtypes"] == ["bfloat16", "float16", "float32", "float8_e4m3fn"]


def test_merge_gathers_the_pieces_of_all_ranks() -> None:
    first, second = manifest(0, frozenset({"lm_head", "bias"})), manifest(1)
    merged = merge([first, second])
    assert merged.world_size == 2
    assert merged.tensors == first.tensors
    assert merged.ignored == {"lm_head"}
    assert [piece.rank for piece in merged.pieces["q"]] == [0, 1]
    assert [piece.source[0] for piece in merged.pieces["q"]] == [(0, 128), (128, 256)]
    assert merge(iter([first])) == first


def test_a_rank_that_serves_nothing_of_a_tensor_has_no_piece_in_the_whole() -> None:
    first, second = manifest(0), manifest(1)
    merged = merge([first, replace(second, pieces={"q": second.pieces["q"]})])
    assert [piece.rank for piece in merged.pieces["norm"]] == [0]


def test_what_one_rank_ignores_another_may_take() -> None:
    """Experts that each rank has alone."""
    first, second = manifest(0), manifest(1)
    alone = replace(
        second,
        tensors={"q": second.tensors["q"]},
        ignored=frozenset({"lm_head", "norm"}),
        pieces={"q": second.pieces["q"]},
    )
    for ranks in ([first, alone], [alone, first]):
        merged = merge(ranks)
        assert merged.tensors == first.tensors
        assert merged.ignored == {"lm_head"}
        assert [piece.rank for piece in merged.pieces["norm"]] == [0]


NAMES = ("embed", "first", "second", "lm_head")


def stage(rank: int, served: str, tied: dict[str, str] | None = None, **aliases: str) -> Manifest:
    """One of three pipeline stages of a model with two layers; it ignores what other stages serve."""
    tensors = {name: TensorSpec(name, (64,), "bfloat16") for name in served.split()}
    pieces = {name: (ShardSlice(rank, name, (64,), ((0, 64),), (0,), False, "bfloat16"),) for name in tensors}
    ignored = frozenset(NAMES).difference(tensors, tied or {})
    return Manifest(tensors, ignored, pieces, "fp32", 1, tied or {}, aliases)


def test_pipeline_stages_make_up_the_whole() -> None:
    merged = merge([stage(0, "embed first"), stage(1, "second"), stage(2, "lm_head")])
    assert set(merged.tensors) == set(NAMES)
    assert merged.ignored == frozenset()
    assert merged.tied == {}
    assert {name: [piece.rank for piece in parts] for name, parts in merged.pieces.items()} == {
        "embed": [0],
        "first": [0],
        "second": [1],
        "lm_head": [2],
    }
    problems = merged.problems([TensorSpec(name, (64,), "bfloat16") for name in (*NAMES, "third")])
    assert [(problem["kind"], problem["tensor"]) for problem in problems] == [("unknown-tensor", "third")]


def test_a_tied_embedding_lies_on_the_first_and_the_last_stage() -> None:
    """Stages between have neither, and say nothing of it."""
    tied = {"lm_head": "embed"}
    merged = merge([stage(0, "embed first", tied), stage(1, "second"), stage(2, "embed", tied)])
    assert merged.tied == tied
    assert merged.ignored == frozenset()
    assert [piece.rank for piece in merged.pieces["embed"]] == [0, 2]
    with pytest.raises(UpdateError, match=r"served as the embedding: {} and {'lm_head': 'embed'}"):
        merge([stage(0, "embed first", tied), stage(2, "embed")])


def test_stages_that_do_not_serve_a_tensor_do_not_decide_on_its_other_names() -> None:
    """They could not try them: the one that serves it has found that `other` is none."""
    first = stage(0, "embed first", alias="first", other="second")
    merged = merge([first, stage(1, "second", alias="first", right="second")])
    assert merged.aliases == {"alias": "first", "right": "second"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(manifest(1), scale_format="pow2"), "scale_format fp32 and pow2"),
        (
            replace(manifest(1), tied={"head": "norm"}),
            r"output layers that are served as the embedding: {} and {'head': 'norm'}",
        ),
        (
            replace(manifest(1), tensors={"q": TensorSpec("q", (256, 64), "bfloat16")}),
            r"norm: float32 \[64\] and nothing",
        ),
        (
            replace(manifest(1), tensors={**manifest().tensors, "q": TensorSpec("q", (128, 64), "bfloat16")}),
            r"q: .*\[128, 64\]",
        ),
    ],
    ids=["scale format", "ties", "names", "shapes"],
)
def test_ranks_that_disagree_are_refused(other: Manifest, said: str) -> None:
    with pytest.raises(UpdateError, match=said) as caught:
        merge([manifest(0), other])
    assert (caught.value.kind, caught.value.status) == ("rank-mismatch", 500)


def test_every_problem_is_found() -> None:
    brought = [
        TensorSpec("q", (256, 65), "int8"),
        TensorSpec("norm", (64,), "float16"),
        TensorSpec("stranger", (1,), "bfloat16"),
        TensorSpec("lm_head", (9, 9), "int8"),
    ]
    assert manifest().problems(brought) == [
        {"kind": "wrong-shape", "tensor": "q", "expected": [256, 64], "found": [256, 65]},
        {"kind": "wrong-dtype", "tensor": "q", "expected": [*DTYPES, CODES_DTYPE], "found": "int8"},
        {"kind": "unknown-tensor", "tensor": "stranger"},
    ]


@pytest.mark.parametrize(
    "name", ["layers.0.attn.k_scale", "layers.0.k_proj.v_scale", "layers.0.attn.q.scale"]
)
def test_scales_of_the_kv_cache_may_come_and_are_not_used(name: str) -> None:
    assert manifest().problems([TensorSpec(name, (), "float32")]) == []
    assert manifest().ignores(name)
    (problem,) = manifest().problems([TensorSpec(f"{name}s", (), "float32")])
    assert problem["kind"] == "unknown-tensor"


def test_a_tensor_of_the_model_with_such_a_name_is_required() -> None:
    spec = TensorSpec("gate.k_scale", (4,), "float32")
    known = Manifest({spec.name: spec}, frozenset(), {spec.name: ()}, "fp32", 1)
    assert not known.ignores(spec.name)
    (problem,) = known.problems([TensorSpec(spec.name, (5,), "float32")])
    assert problem["kind"] == "wrong-shape"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_may_be_sent_is_torchs(dtype: str) -> None:
    spec = TensorSpec("q", (256, 64), dtype)
    assert manifest().problems([spec]) == []
    assert spec.torch_dtype == getattr(torch, dtype)


def piece(rows: tuple[int, int], origin: int, room: int, columns: tuple[int, int] = (0, 256)) -> ShardSlice:
    width = columns[1] - columns[0]
    return ShardSlice(0, "w", (room, width), (rows, columns), (origin, 0), True, "bfloat16")


@pytest.mark.parametrize(
    ("shape", "pieces", "taken"),
    [
        ((256, 256), [piece((0, 256), 0, 256)], True),
        ((256, 256), [piece((0, 128), 0, 128), piece((128, 256), 0, 128)], True),
        ((256, 256), [piece((0, 256), 0, 256, (0, 128)), piece((0, 256), 0, 256, (128, 256))], True),
        ((200, 256), [piece((0, 200), 128, 328)], True),  # the last block of both is cut off alike
        ((200, 256), [piece((0, 200), 0, 328)], False),  # another tensor's rows share its last block
        ((256, 256), [piece((0, 256), 64, 320)], False),
        ((256, 256), [piece((0, 64), 0, 64), piece((64, 256), 0, 192)], False),
        ((256, 192), [piece((0, 256), 0, 256, (0, 96)), piece((0, 256), 0, 256, (96, 192))], False),
        ((256, 256), [replace(piece((0, 256), 0, 256), quantized=False)], False),
        ((256, 256), [], False),
    ],
)
def test_codes_are_taken_where_blocks_are_those_that_are_served(shape, pieces, taken) -> None:
    manifest = Manifest(
        {"w": TensorSpec("w", shape, "bfloat16")}, frozenset(), {"w": tuple(pieces)}, "fp32", 1
    )
    assert manifest.takes_codes("w") == taken
    assert (CODES_DTYPE in manifest.dtypes_of("w")) == taken
    assert manifest.as_dict()["tensors"]["w"]["takes_codes"] == taken
    brought = [
        TensorSpec("w", shape, CODES_DTYPE),
        TensorSpec("w_scale_inv", (2, -(-shape[1] // 128)), "float32"),
    ]
    assert [problem["kind"] for problem in manifest.problems(brought)] == ([] if taken else ["wrong-dtype"])


def test_codes_and_scales_come_together() -> None:
    manifest = Manifest(
        {"w": TensorSpec("w", (256, 256), "bfloat16")},
        frozenset(),
        {"w": (piece((0, 256), 0, 256),)},
        "fp32",
        1,
    )
    codes, scales = TensorSpec("w", (256, 256), CODES_DTYPE), TensorSpec("w_scale_inv", (2, 2), "float32")
    assert manifest.problems([codes]) == [
        {"kind": "missing-scales", "tensor": "w", "expected": "w_scale_inv"}
    ]
    assert [problem["kind"] for problem in manifest.problems([scales])] == ["unknown-tensor"]
    beside = [replace(codes, dtype="bfloat16"), scales]
    assert [problem["kind"] for problem in manifest.problems(beside)] == ["unknown-tensor"]
    assert manifest.problems([codes, replace(scales, shape=(1, 2))]) == [
        {"kind": "wrong-shape", "tensor": "w_scale_inv", "expected": [2, 2], "found": [1, 2]}
    ]


def test_what_lies_in_one_parameter_is_completed() -> None:
    names = {name: TensorSpec(name, (4, 2), "bfloat16") for name in "qkvon"}
    pieces = {
        name: (ShardSlice(0, target, (12, 2), ((0, 4), (0, 2)), (0, 0), False, "bfloat16"),)
        for name, target in zip("qkvo", ("qkv", "qkv", "qkv", "o"), strict=True)
    }
    manifest = Manifest(names, frozenset(), pieces, "fp32", 1)
    assert manifest.completed(["k", "o"]) == set("qkvo")
    assert manifest.completed(["n", "unknown"]) == {"n"}
    assert manifest.completed([]) == set()


def test_targets_of_one_name_on_two_ranks_are_not_one_parameter() -> None:
    """Each rank counts its own experts from 0."""
    spec = TensorSpec("", (128, 64), "bfloat16")
    pieces = {
        f"experts.{expert}": (
            ShardSlice(
                rank, f"w[{expert - 2 * rank}]", (128, 64), ((0, 128), (0, 64)), (0, 0), True, "bfloat16"
            ),
        )
        for rank, expert in ((0, 0), (0, 1), (1, 2), (1, 3))
    }
    tensors = {name: replace(spec, name=name) for name in pieces}
    whole = Manifest(tensors, frozenset(), pieces, "fp32", 2)
    assert whole.completed(["experts.2"]) == {"experts.2"}


@pytest.mark.parametrize("name", ["module.q", "module._orig_mod.q"])
def test_what_a_wrapper_puts_before_names_is_seen(name: str) -> None:
    [problem] = manifest().problems([TensorSpec(name, (256, 64), "bfloat16")])
    assert problem == {"kind": "unknown-tensor", "tensor": name, "detail": "is q meant?"}


def test_another_name_stands_for_the_manifests() -> None:
    first = replace(manifest(0), aliases={"model.q": "q", "head": "lm_head"}, tied={"out": "norm"})
    known = merge([first, replace(manifest(1), aliases={"model.norm": "norm"}, tied={"out": "norm"})])
    assert known.tied == {"out": "norm"}
    names = ["model.q", "model.q_scale_inv", "model.norm", "head", "q", "stranger"]
    assert [known.canonical(name) for name in names] == [
        "q",
        "q_scale_inv",
        "norm",
        "lm_head",
        "q",
        "stranger",
    ]
    assert known.canonical("model.q[0:128,0:64]_scale_inv") == "q[0:128,0:64]_scale_inv", "of a slice's codes"
    assert known.takes_codes("model.q") == known.takes_codes("q")
    assert known.dtype_of("model.q") == torch.bfloat16
    assert known.shape_of("out") == (64,)
    assert not known.ignores("out")
