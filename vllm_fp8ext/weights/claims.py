# SPDX-License-Identifier: Apache-2.0
"""What a client says beforehand about the tensors that it will send."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_fp8ext.weights.manifest import DTYPES, Manifest, TensorSpec


@dataclass(frozen=True, slots=True)
class Claim:
    """Shape, dtype (torch's name) and SHA-256 of the raw bytes of one tensor, as far as they were told."""

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    sha256: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Claim":
        shape = data.get("shape")
        return cls(None if shape is None else tuple(shape), data.get("dtype"), data.get("sha256"))


def opening_problems(claims: Mapping[str, Claim], manifest: Manifest) -> list[dict[str, Any]]:
    """Everything wrong with claims before a byte is sent: what they name must fit the manifest."""
    specs = []
    for name, claim in claims.items():
        shape = claim.shape if claim.shape is not None else manifest.shape_of(name) or ()
        specs.append(TensorSpec(name, shape, claim.dtype or DTYPES[0]))
    return manifest.problems(specs)


def claim_problems(claims: Mapping[str, Claim], specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """Tensors of a chunk that differ from what was claimed of them."""
    found: list[dict[str, Any]] = []
    for spec in specs:
        claim = claims.get(spec.name, Claim())
        if claim.shape is not None and claim.shape != spec.shape:
            found.append(_problem("wrong-shape", spec.name, list(claim.shape), list(spec.shape)))
        if claim.dtype is not None and claim.dtype != spec.dtype:
            found.append(_problem("wrong-dtype", spec.name, claim.dtype, spec.dtype))
    return found


def _problem(kind: str, tensor: str, expected: Any, found: Any) -> dict[str, Any]:
    return {"kind": kind, "tensor": tensor, "expected": expected, "found": found}
