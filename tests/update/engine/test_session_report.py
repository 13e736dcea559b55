# SPDX-License-Identifier: Apache-2.0
"""What is told about an update."""

from collections.abc import Callable

import pytest

from vllm_fp8ext.update.contract.update_errors import refusal
from vllm_fp8ext.update.engine.session import Running, Session
from vllm_fp8ext.update.engine.timestamp import Moment

from .sessions import (
    CANARY,
    MANIFEST,
    ended,
    opened,
    send,
    specs,
)


def test_what_is_told_about_an_update() -> None:
    session = Session(
        "u1", "step-9", Running.RECOMPUTE, MANIFEST, Moment(7.0, 123.0), 60.0, CANARY, base_epoch=4
    )
    send(session, "0", "ab", 30)
    session.receive("1", specs("c"), 15, "ab" * 32)
    assert session.describe().as_dict() == {
        "partial": False,
        "sparse": False,
        "world_size": 1,
        "id": "u1",
        "state": "open",
        "version": "step-9",
        "running": "recompute",
        "base_epoch": 4,
        "opened_at": 123.0,
        "expires_at": 183.0,
        "tensors_required": 4,
        "tensors_missing": 2,
        "missing": ["c", "d"],
        "bytes": 30,
        "chunks": {
            "0": {"staged": True, "busy": False, "bytes": 30, "tensors": 2, "sha256": None},
            "1": {"staged": False, "busy": True, "bytes": 15, "tensors": 1, "sha256": "ab" * 32},
        },
        "problems": [],
        "problem_count": 0,
        "seconds": {},
        "quantization_error": None,
        "canary_perplexity": None,
        "kv_scales": None,
        "result": None,
        "max_chunk_bytes": None,
        "group": None,
    }


@ended
def test_an_ended_update_misses_nothing_and_has_no_time_left(make: Callable[[], Session]) -> None:
    told = make().describe().as_dict()
    assert (told["tensors_missing"], told["missing"], told["expires_at"]) == (0, [], None)


def test_the_quantization_error_is_relative() -> None:
    """A tensor without a norm (not quantized, or all zeros) has none; a chunk that comes again brings its own."""
    session = opened()
    session.receive("0", specs("ab"), 10)
    session.staged("0", [], {"a": (9.0, 100.0), "b": (0.0, 0.0)})
    session.receive("1", specs("c"), 10)
    session.staged("1", [], {"c": (1000.0, 1.0)})
    session.receive("1", specs("c"), 10)
    session.staged("1", [], {"c": (16.0, 300.0)})
    result = session.quantization_error
    assert result is not None
    assert result["relative"] == pytest.approx((25 / 400) ** 0.5)
    assert result["mean"] == pytest.approx((0.3 + (16 / 300) ** 0.5) / 2)
    assert (result["max"], result["worst"]) == (pytest.approx(0.3), "a")


def test_without_quantized_tensors_there_is_no_quantization_error() -> None:
    session = opened()
    session.receive("0", specs("a"), 10)
    session.staged("0", [], {"a": (0.0, 0.0)})
    assert session.quantization_error is None


def test_refusals_carry_all_problems() -> None:
    problems = [{"kind": "wrong-shape", "tensor": "a", "expected": [1], "found": [2]}]
    error = refusal(problems)
    assert (error.kind, error.status) == ("wrong-shape", 422)
    assert error.details == {"problems": problems, "problem_count": 1}
    assert str(error) == "1 problem: wrong-shape: tensor a expected [1] found [2]"
