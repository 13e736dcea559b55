# SPDX-License-Identifier: Apache-2.0
"""Compares the bytes of tensors that come as rows with what was claimed of them."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from vllm_fp8ext.update.transports.read_ahead import TensorRows


class Checksums:
    """Hashes rows as they come, against the SHA-256 that a client claimed.

    `expected`: by the name of what was sent, the hexadecimal SHA-256 of its raw bytes, and the names of the tensors that it
    comes as, in order: its own, or those of a fused one.
    """

    def __init__(self, expected: Mapping[str, tuple[str, Sequence[str]]]) -> None:
        self._expected = expected
        self._sent = {part: name for name, (_, parts) in expected.items() for part in parts}
        self._hashes = {name: hashlib.sha256() for name in expected}

    @property
    def parts(self) -> Collection[str]:
        """Names of the tensors that are hashed."""
        return self._sent.keys()

    def problem(self, rows: TensorRows) -> dict[str, Any] | None:
        """Hash the next rows of a tensor; return what is wrong with what was sent, once it ends with them."""
        sent = self._sent.get(rows.stored.spec.name)
        if sent is None:
            return None
        sha, (expected, parts) = self._hashes[sent], self._expected[sent]
        sha.update(memoryview(rows.values.reshape(-1).view(torch.uint8).cpu().numpy()))
        if not rows.last or rows.stored.spec.name != parts[-1]:
            return None
        actual = sha.hexdigest()
        if actual == expected:
            return None
        return {"kind": "sha256-mismatch", "tensor": sent, "expected": expected, "found": actual}
