# SPDX-License-Identifier: Apache-2.0
"""Compares the bytes of tensors that come as rows with what was claimed of them."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from vllm_fp8ext.weights.read_ahead import Rows


class Checksums:
    """`expected`: hexadecimal SHA-256 by tensor, of its raw bytes."""

    def __init__(self, expected: Mapping[str, str]) -> None:
        self._expected = expected
        self._hashes: dict[str, Any] = {}

    def problem(self, rows: Rows) -> dict[str, Any] | None:
        """Take the next rows of a tensor; what is wrong with it, once it ends with them."""
        name = rows.stored.spec.name
        if name not in self._expected:
            return None
        sha = self._hashes.setdefault(name, hashlib.sha256())
        sha.update(memoryview(rows.values.reshape(-1).view(torch.uint8).cpu().numpy()))
        if not rows.last:
            return None
        expected, found = self._expected[name], self._hashes.pop(name).hexdigest()
        if found == expected:
            return None
        return {"kind": "sha256-mismatch", "tensor": name, "expected": expected, "found": found}
