# SPDX-License-Identifier: Apache-2.0
"""Checksums of tensors that come as rows."""

import hashlib

import pytest
import torch

from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.worker.checksums import Checksums

VALUES = torch.randn(10, 3).bfloat16()
STORED = StoredTensor(TensorSpec("w", (10, 3), "bfloat16"), 0, 60)
SHA = hashlib.sha256(VALUES.view(torch.uint8).numpy().tobytes()).hexdigest()
PARTS = [
    TensorRows(STORED, 0, VALUES[:4]),
    TensorRows(STORED, 4, VALUES[4:9]),
    TensorRows(STORED, 9, VALUES[9:]),
]


@pytest.mark.parametrize("parts", [PARTS, [TensorRows(STORED, 0, VALUES)]], ids=["rows", "whole"])
def test_a_tensor_is_judged_once_all_of_it_is_there(parts: list[TensorRows]) -> None:
    right, wrong = Checksums({"w": (SHA, ["w"])}), Checksums({"w": ("0" * 64, ["w"])})
    assert [right.problem(rows) for rows in parts] == [None] * len(parts)
    *before, last = [wrong.problem(rows) for rows in parts]
    assert before == [None] * (len(parts) - 1)
    assert last == {"kind": "sha256-mismatch", "tensor": "w", "expected": "0" * 64, "found": SHA}


def test_each_tensor_has_its_own() -> None:
    scalar = StoredTensor(TensorSpec("s", (), "float32"), 0, 4)
    value = torch.tensor(1.5)
    sha = hashlib.sha256(value.numpy().tobytes()).hexdigest()
    checksums = Checksums({"w": (SHA, ["w"]), "s": (sha, ["s"])})
    assert checksums.problem(PARTS[0]) is None
    assert checksums.problem(TensorRows(scalar, 0, value)) is None
    assert [checksums.problem(rows) for rows in PARTS[1:]] == [None, None]
    assert Checksums({"s": (SHA, ["s"])}).problem(TensorRows(scalar, 0, value)) is not None


def test_what_was_not_claimed_passes() -> None:
    assert Checksums({"other": (SHA, ["other"])}).problem(PARTS[-1]) is None


@pytest.mark.parametrize("right", [True, False])
def test_what_was_sent_as_one_is_judged_as_one(right: bool) -> None:
    """Of a tensor that comes as two."""
    both = torch.randn(4, 3).bfloat16()
    halves = {
        name: TensorRows(
            StoredTensor(TensorSpec(name, (2, 3), "bfloat16"), 12 * n, 12), 0, both[2 * n : 2 * n + 2]
        )
        for n, name in enumerate(("gate", "up"))
    }
    result = hashlib.sha256(both.view(torch.uint8).numpy().tobytes()).hexdigest()
    expected = result if right else "0" * 64
    checksums = Checksums({"fused": (expected, ["gate", "up"])})
    assert checksums.problem(halves["gate"]) is None
    wrong = {"kind": "sha256-mismatch", "tensor": "fused", "expected": expected, "found": result}
    assert checksums.problem(halves["up"]) == (None if right else wrong)
