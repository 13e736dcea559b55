# SPDX-License-Identifier: Apache-2.0
"""What a client claims beforehand, against the manifest and against what it sends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.update.contract.claims import Claim, claim_problems, opening_problems
from vllm_fp8ext.update.contract.manifest import DTYPES, Manifest, TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice

SPEC = TensorSpec("a", (4, 2), "bfloat16")
MANIFEST = Manifest({"a": SPEC}, frozenset({"tied"}), {}, "fp32", 1)
SHAPES = st.none() | st.lists(st.integers(0, 4), max_size=3).map(tuple)
HASH = "0" * 64
CODES = Manifest(
    {"w": TensorSpec("w", (256, 128), "bfloat16"), "n": SPEC},
    frozenset(),
    {
        "w": (ShardSlice(0, "w", (256, 128), ((0, 256), (0, 128)), (0, 0), True, "bfloat16"),),
        "n": (ShardSlice(0, "n", (4, 2), ((0, 4), (0, 2)), (0, 0), False, "bfloat16"),),
    },
    "fp32",
    1,
)
"""`w` may come as codes, and `n` may not."""
MATRICES = [f"m.experts.{expert}.{name}_proj.weight" for expert in range(2) for name in ("gate", "up")]
EXPERTS = Manifest(
    {name: TensorSpec(name, (2, 4), "bfloat16") for name in MATRICES}, frozenset(), {}, "fp32", 1
)
FUSED = "m.experts.gate_up_proj"
DTYPE_NAMES = st.none() | st.sampled_from((*DTYPES, "int8", ""))


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        ({}, Claim()),
        ({"shape": None, "dtype": None, "sha256": None}, Claim()),
        ({"shape": [], "sha256": "0" * 64}, Claim((), None, "0" * 64)),
        ({"shape": [4, 2], "dtype": "float16"}, Claim((4, 2), "float16")),
    ],
)
def test_claims_come_as_plain_data(data: dict[str, object], claim: Claim) -> None:
    assert Claim.from_dict(data) == claim


@pytest.mark.parametrize(
    ("name", "claim", "kinds"),
    [
        ("a", Claim(), []),
        ("a", Claim(sha256="0" * 64), []),
        ("a", Claim((4, 2), "float32"), []),
        ("a", Claim((2, 4)), ["wrong-shape"]),
        ("a", Claim(()), ["wrong-shape"]),
        ("a", Claim(dtype="int8"), ["wrong-dtype"]),
        ("a", Claim((1,), "int8"), ["wrong-shape", "wrong-dtype"]),
        ("stranger", Claim(), ["unknown-tensor"]),
        ("stranger", Claim((4, 2), "int8"), ["unknown-tensor"]),
        ("tied", Claim((1,), "int8"), []),
    ],
)
def test_claims_must_fit_the_manifest(name: str, claim: Claim, kinds: list[str]) -> None:
    assert [problem["kind"] for problem in opening_problems({name: claim}, MANIFEST)] == kinds


@pytest.mark.parametrize(
    ("claims", "kinds"),
    [
        ({"w": Claim(dtype="float8_e4m3fn")}, []),
        ({"w": Claim(dtype="float8_e4m3fn", sha256=HASH), "w_scale_inv": Claim(sha256=HASH)}, []),
        ({"w": Claim(sha256=HASH), "w_scale_inv": Claim()}, []),
        ({"w_scale_inv": Claim((2, 1), "float32")}, []),
        ({"w_scale_inv": Claim((1, 2))}, ["wrong-shape"]),
        ({"w_scale_inv": Claim(dtype="bfloat16")}, ["wrong-dtype"]),
        ({"w": Claim(dtype="bfloat16"), "w_scale_inv": Claim()}, ["unknown-tensor"]),
        ({"n": Claim(), "n_scale_inv": Claim()}, ["unknown-tensor"]),
        ({"n": Claim(dtype="float8_e4m3fn")}, ["wrong-dtype"]),
    ],
)
def test_claims_of_codes_and_scales_need_not_be_whole(claims: dict[str, Claim], kinds: list[str]) -> None:
    assert [problem["kind"] for problem in opening_problems(claims, CODES)] == kinds


def test_a_hash_is_of_the_form_in_which_a_tensor_comes() -> None:
    whole = TensorSpec(FUSED, (2, 4, 4), "bfloat16")
    for claimed, sent in ((FUSED, EXPERTS.tensors[MATRICES[1]]), (MATRICES[1], whole)):
        [listed] = claim_problems({claimed: Claim(sha256=HASH)}, [sent], EXPERTS)
        assert listed == {"kind": "wrong-form", "tensor": sent.name, "expected": claimed, "found": sent.name}
        assert claim_problems({claimed: Claim()}, [sent], EXPERTS) == []
    assert claim_problems({FUSED: Claim(sha256=HASH)}, [whole], EXPERTS) == []


def test_all_problems_of_all_claims_are_told() -> None:
    claims = {"x": Claim(), "a": Claim((1,), "int8"), "y": Claim((3,))}
    assert [(problem["tensor"], problem["kind"]) for problem in opening_problems(claims, MANIFEST)] == [
        ("x", "unknown-tensor"),
        ("a", "wrong-shape"),
        ("a", "wrong-dtype"),
        ("y", "unknown-tensor"),
    ]


@given(SHAPES, DTYPE_NAMES)
def test_a_tensor_is_held_to_what_was_claimed_of_it(shape: tuple[int, ...] | None, dtype: str | None) -> None:
    listed = claim_problems({"a": Claim(shape, dtype), "b": Claim((9,), "int8")}, [SPEC], MANIFEST)
    expected = []
    if shape not in (None, (4, 2)):
        expected.append(("wrong-shape", "a", list(shape or ()), [4, 2]))
    if dtype not in (None, "bfloat16"):
        expected.append(("wrong-dtype", "a", dtype, "bfloat16"))
    assert [(p["kind"], p["tensor"], p["expected"], p["found"]) for p in listed] == expected


def test_tensors_without_a_claim_are_not_held_to_any() -> None:
    assert claim_problems({}, [SPEC, TensorSpec("b", (), "int8")], MANIFEST) == []
