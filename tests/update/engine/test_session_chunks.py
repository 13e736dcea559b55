# SPDX-License-Identifier: Apache-2.0
"""Chunks of an update: what is refused, replaced, missing and waited for."""

from dataclasses import replace
from typing import Any

import pytest

from vllm_fp8ext.update.contract.claims import Claim
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.contract.tensor_slices import extents, parsed_slice
from vllm_fp8ext.update.engine.session import Session, State

from .sessions import (
    NAMES,
    opened,
    prepare,
    prepared,
    refused,
    send,
    specs,
)


def test_everything_wrong_with_a_chunk_is_in_one_error() -> None:
    session = opened()
    send(session, "0", "ab")
    brought = [
        *specs(["a", "stranger", "tied"]),
        TensorSpec("c", (4, 3), "bfloat16"),
        TensorSpec("d", (4, 2), "int8"),
    ]
    before = session.describe().as_dict()
    error = refused(lambda: session.receive("1", brought, 10))
    assert (error.kind, error.status) == ("invalid-tensors", 422)
    assert [(problem["kind"], problem["tensor"]) for problem in error.details["problems"]] == [
        ("unknown-tensor", "stranger"),
        ("wrong-shape", "c"),
        ("wrong-dtype", "d"),
        ("duplicate-tensor", "a"),
    ]
    assert all(name in str(error) for name in ("stranger", "c", "d", "a"))
    assert session.describe().as_dict() == before


def test_problems_of_one_kind_give_the_error_its_kind() -> None:
    error = refused(lambda: opened().receive("0", specs(f"stranger{n}" for n in range(12)), 10))
    assert error.kind == "unknown-tensor"
    assert len(error.details["problems"]) == 12
    assert str(error).startswith("12 problems: ")
    assert str(error).endswith("and 4 more")


def test_what_differs_from_its_claim_is_refused_and_told_once() -> None:
    """A tensor that differs from the manifest and from its claim in the same way has one problem."""
    claims = {"a": Claim((4, 2), "float16"), "b": Claim((2, 4)), "c": Claim(sha256="0" * 64)}
    session = opened(claims=claims)
    brought = [TensorSpec("b", (4, 1), "bfloat16"), *specs("ac")]
    error = refused(lambda: session.receive("0", brought, 10))
    result = [(p["kind"], p["tensor"], p["expected"]) for p in error.details["problems"]]
    assert result == [("wrong-shape", "b", [4, 2]), ("wrong-dtype", "a", "float16")]
    session.receive("0", [TensorSpec("a", (4, 2), "float16"), *specs("c")], 10)


def test_a_tensor_belongs_to_one_chunk() -> None:
    session = opened()
    session.receive("0", specs("ab"), 10)
    error = refused(lambda: session.receive("1", specs("bc"), 10))
    assert error.kind == "duplicate-tensor"
    assert error.details["problems"] == [{"kind": "duplicate-tensor", "tensor": "b", "chunk": "0"}]


def test_ignored_tensors_may_come_often() -> None:
    session = opened()
    send(session, "0", ["a", "b", "tied"])
    send(session, "1", ["c", "d", "tied"])
    prepare(session)


def test_a_chunk_is_replaced_as_a_whole() -> None:
    """What the first version brought and the second does not is missing again; nothing is a duplicate of
    it."""
    session = opened()
    send(session, "0", "abc", 30)
    send(session, "0", "a", 10)
    assert sorted(session.missing()) == ["b", "c", "d"]
    send(session, "1", "bcd", 25)
    assert sorted(session.missing()) == []
    assert session.describe().as_dict()["bytes"] == 35


def test_a_chunk_that_is_being_staged_is_not_replaced() -> None:
    session = opened()
    session.receive("0", specs("a"), 10)
    error = refused(lambda: session.receive("0", specs("a"), 10))
    assert (error.kind, error.status) == ("chunk-busy", 409)
    session.staged("0", [])
    session.receive("0", specs("a"), 10)


def test_a_replacement_counts_only_once_it_is_staged() -> None:
    session = prepared()
    session.receive("0", specs(NAMES), 10)
    assert sorted(session.missing()) == list(NAMES)
    assert session.describe().as_dict()["bytes"] == 0


def test_a_refused_chunk_counts_as_missing() -> None:
    session = opened()
    send(session, "0", "ab")
    session.receive("1", specs("cd"), 10)
    problem = {"kind": "non-finite", "tensor": "c"}
    session.staged("1", [problem])
    assert sorted(session.missing()) == ["c", "d"]
    error = refused(lambda: prepare(session))
    assert (error.kind, error.status) == ("incomplete", 422)
    assert error.details == {"missing": ["c", "d"], "problems": [problem], "problem_count": 1}
    assert session.describe().as_dict()["problems"] == [problem]


@pytest.mark.parametrize("key", ["1", "2"])
def test_a_refused_chunk_is_sent_again_under_its_own_or_another_key(key: str) -> None:
    session = opened()
    send(session, "0", "ab")
    session.receive("1", specs("cd"), 10)
    session.staged("1", [{"kind": "non-finite", "tensor": "c"}])
    send(session, key, "cd")
    prepare(session)
    assert session.state is State.PREPARED


def test_every_missing_tensor_is_listed() -> None:
    error = refused(lambda: opened().check(0))
    assert error.kind == "incomplete"
    assert error.details["missing"] == list(NAMES)
    assert "lacks 4 of 4 tensors: a, b, c, d" in str(error)


def test_preparing_waits_for_chunks_that_are_being_staged() -> None:
    session = opened()
    send(session, "0", NAMES)
    session.receive("1", specs(["tied"]), 10)
    error = refused(lambda: prepare(session))
    assert (error.kind, error.status) == ("staging", 409)


SLICED = Manifest(
    {"w": TensorSpec("w", (4, 2), "bfloat16"), "v": TensorSpec("v", (2,), "bfloat16")},
    frozenset(),
    {
        "w": tuple(
            ShardSlice(rank, "t", (2, 2), ((2 * rank, 2 * rank + 2), (0, 2)), (0, 0), True, "bfloat16")
            for rank in range(2)
        ),
        "v": tuple(ShardSlice(rank, "v", (2,), ((0, 2),), (0,), False, "bfloat16") for rank in range(2)),
    },
    "fp32",
    2,
)


def sliced(session: Session, key: str, *names: str) -> None:
    """Receive and stage these tensors and slices as a chunk."""
    shapes = {name: extents(part.box) if (part := parsed_slice(name)) else (2,) for name in names}
    session.receive(key, [TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items()], 10)
    session.staged(key, [])


def of_slices(**more: Any) -> Session:
    session = opened()
    return replace(session, manifest=SLICED, **more)


def test_a_tensor_has_come_with_the_last_of_its_slices() -> None:
    session = of_slices()
    sliced(session, "0", "w[0:1,0:2]", "v")
    assert session.describe().missing == ["w"]
    error = refused(lambda: session.check(0))
    assert (error.kind, error.details["missing"]) == ("incomplete", ["w[0:2,0:2]", "w[2:4,0:2]"])
    sliced(session, "1", "w[1:3,0:2]")
    assert refused(lambda: session.check(0)).details["missing"] == ["w[2:4,0:2]"]
    sliced(session, "2", "w[3:4,0:2]")
    assert session.describe().missing == []
    session.check(0)
    session.receive("1", [TensorSpec("w[1:2,0:2]", (1, 2), "bfloat16")], 10)
    session.staged("1", [])
    assert session.describe().missing == ["w"], "the chunk was replaced by a smaller one"


def test_a_slice_that_was_refused_is_missing_again() -> None:
    session = of_slices(partial=True, base_epoch=0)
    sliced(session, "0", "w[0:2,0:2]")
    session.receive("1", [TensorSpec("w[2:4,0:2]", (2, 2), "bfloat16")], 10)
    session.staged("1", [{"kind": "non-finite", "tensor": "w[2:4,0:2]"}])
    assert session.required() == session.missing() == {"w"}
    sliced(session, "1", "w[2:4,0:2]")
    assert (session.required(), session.missing()) == ({"w"}, set())


def test_of_a_partial_update_all_slices_of_a_tensor_must_come() -> None:
    session = of_slices(partial=True, base_epoch=0)
    sliced(session, "0", "w[0:2,0:2]")
    assert session.missing() == {"w"}


@pytest.mark.parametrize(
    ("first", "then", "other"),
    [
        ("w[0:2,0:2]", "w[1:3,0:2]", "w[0:2,0:2]"),
        ("w[0:2,0:2]", "w", "w[0:2,0:2]"),
        ("w", "w[0:2,0:2]", "w"),
    ],
)
def test_what_has_come_does_not_come_again_in_another_slice(first: str, then: str, other: str) -> None:
    session = of_slices()
    shape = {"w": (4, 2)}
    session.receive("0", [TensorSpec(first, shape.get(first, (2, 2)), "bfloat16")], 10)
    error = refused(lambda: session.receive("1", [TensorSpec(then, shape.get(then, (2, 2)), "bfloat16")], 10))
    assert error.kind == "duplicate-tensor"
    [problem] = error.details["problems"]
    assert (problem["tensor"], problem["chunk"], problem["detail"]) == (
        then,
        "0",
        f"{other} has elements of it, too",
    )
    pair = [TensorSpec(name, (2, 2), "bfloat16") for name in ("w[0:2,0:2]", "w[1:3,0:2]")]
    assert refused(lambda: of_slices().receive("0", pair, 10)).kind == "duplicate-tensor"


def test_a_slice_does_not_pass_the_claim_of_its_tensor() -> None:
    session = of_slices(claims={"w": Claim(sha256="0" * 64)})
    error = refused(lambda: sliced(session, "0", "w[0:2,0:2]"))
    assert (error.kind, error.details["problems"][0]["expected"]) == ("wrong-form", "w")


@pytest.mark.parametrize("other", ["w", "w[0:4,0:2]", "w[1:2,0:2]"])
def test_other_slices_do_not_pass_the_claim_of_one(other: str) -> None:
    session = of_slices(claims={"w[0:2,0:2]": Claim(sha256="0" * 64)})
    part = parsed_slice(other)
    brought = [TensorSpec(other, extents(part.box) if part else (4, 2), "bfloat16")]
    error = refused(lambda: session.receive("0", brought, 10))
    assert (error.kind, error.details["problems"][0]["expected"]) == ("wrong-form", "w[0:2,0:2]")
    sliced(session, "0", "w[2:4,0:2]")
    sliced(session, "1", "w[0:2,0:2]")


def sparse() -> Session:
    return of_slices(partial=True, sparse=True, base_epoch=0)


def test_a_sparse_update_needs_no_more_than_it_brings() -> None:
    session = sparse()
    assert refused(lambda: session.check(0)).kind == "incomplete"
    sliced(session, "0", "w[0:2,0:2]")
    assert (session.describe().missing, session.written()) == ([], {"w"})
    session.check(0)
    assert refused(lambda: session.check(1)).kind == "stale-base"


def test_what_a_sparse_update_has_written_must_come_again() -> None:
    """A chunk that is replaced, or refused, has written into the shadow."""
    session = sparse()
    sliced(session, "0", "w[0:2,0:2]", "v")
    sliced(session, "0", "v")
    assert session.describe().missing == ["w"]
    assert refused(lambda: session.check(0)).details["missing"] == ["w[0:2,0:2]"]
    sliced(session, "1", "w[0:4,0:2]")
    session.check(0)
    session.receive("1", [TensorSpec("w[0:4,0:2]", (4, 2), "bfloat16")], 10)
    session.staged("1", [{"kind": "non-finite", "tensor": "w[0:4,0:2]"}])
    assert refused(lambda: session.check(0)).details["missing"] == ["w[0:2,0:2]", "w[0:4,0:2]"]


def test_a_sparse_update_of_half_a_block_is_refused_by_name() -> None:
    session = sparse()
    sliced(session, "0", "w[0:1,0:2]")
    error = refused(lambda: session.check(0))
    assert (error.kind, error.details["missing"]) == ("incomplete", ["w[0:2,0:2]"])
    assert "a sparse update of whole blocks lacks" in str(error)
    sliced(session, "1", "w[1:2,0:2]")
    session.check(0)


def test_rows_that_come_again_in_other_slices_count_once() -> None:
    """Half a block is no whole one, however often it came; and a whole one is, whatever came before it."""
    one = ShardSlice(0, "t", (4, 2), ((0, 4), (0, 2)), (0, 0), True, "bfloat16")
    manifest = Manifest({"w": TensorSpec("w", (4, 2), "bfloat16")}, frozenset(), {"w": (one,)}, "fp32", 1)
    session = replace(sparse(), manifest=manifest)
    sliced(session, "0", "w[0:2,0:2]")
    sliced(session, "0", "w[0:1,0:2]")
    sliced(session, "1", "w[1:2,0:2]")
    assert refused(lambda: session.check(0)).details["missing"] == ["w[0:4,0:2]"]
    sliced(session, "1")
    sliced(session, "0", "w[0:4,0:2]")
    session.check(0)


def test_a_tensor_that_was_announced_comes_whole_in_a_sparse_update_too() -> None:
    session = of_slices(partial=True, sparse=True, base_epoch=0, claims={"v": Claim()})
    sliced(session, "0", "w[0:2,0:2]")
    assert session.missing() == {"v"}
    sliced(session, "1", "v")
    session.check(0)


def test_a_slice_that_was_announced_comes_in_a_sparse_update() -> None:
    session = of_slices(partial=True, sparse=True, base_epoch=0, claims={"w[0:2,0:2]": Claim()})
    sliced(session, "0", "v", "w[2:4,0:2]")
    assert session.missing() == {"w"}
    assert refused(lambda: session.check(0)).details["missing"] == ["w[0:2,0:2]"]
    sliced(session, "1", "w[0:2,0:2]")
    session.check(0)
