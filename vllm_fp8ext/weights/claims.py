# SPDX-License-Identifier: Apache-2.0
"""What a client says beforehand about the tensors that it will send."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_fp8ext.weights.manifest import CODES_DTYPE, DTYPES, SCALES, Manifest, TensorSpec


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
    """Everything wrong with claims before a byte is sent: what they name must fit the manifest. Of what is not told anything
    may be true that fits."""
    codes = {name.removesuffix(SCALES) for name in claims if name.endswith(SCALES)}
    codes = {name for name in codes if manifest.takes_codes(name)}
    specs = []
    for name, claim in claims.items():
        dtype = claim.dtype or (CODES_DTYPE if name in codes else DTYPES[0])
        specs.append(TensorSpec(name, _either(claim.shape, manifest.shape_of(name)), dtype))
    specs += [TensorSpec(name, manifest.tensors[name].shape, CODES_DTYPE) for name in codes - claims.keys()]
    scales = manifest.scales_among(specs)
    for index, spec in enumerate(specs):
        if spec.name in scales:
            known, claim = scales[spec.name], claims[spec.name]
            shape = _either(claim.shape, known.shape)
            specs[index] = TensorSpec(spec.name, shape, claim.dtype or known.dtype)
    specs += [scale for name, scale in scales.items() if name not in claims]
    return manifest.problems(specs)


def claim_problems(
    claims: Mapping[str, Claim], specs: Iterable[TensorSpec], manifest: Manifest
) -> list[dict[str, Any]]:
    """Tensors of a chunk that differ from what was claimed of them, or come in a form in which a claimed SHA-256 can't be
    checked: an expert's matrices fused, or one by one."""
    if not claims:
        return []
    hashed = {part: name for name, claim in claims.items() if claim.sha256 for part in manifest.parts([name])}
    found: list[dict[str, Any]] = []
    for spec in specs:
        claim = claims.get(spec.name, Claim())
        if claim.shape is not None and claim.shape != spec.shape:
            found.append(_problem("wrong-shape", spec.name, list(claim.shape), list(spec.shape)))
        if claim.dtype is not None and claim.dtype != spec.dtype:
            found.append(_problem("wrong-dtype", spec.name, claim.dtype, spec.dtype))
        others = {hashed[part] for part in manifest.parts([spec.name]) if part in hashed} - {spec.name}
        if others:
            form = {"expected": sorted(others)[0], "found": spec.name}
            found.append({"kind": "wrong-form", "tensor": spec.name, **form})
    return found


def _either(shape: tuple[int, ...] | None, known: tuple[int, ...] | None) -> tuple[int, ...]:
    return shape if shape is not None else known or ()


def _problem(kind: str, tensor: str, expected: Any, found: Any) -> dict[str, Any]:
    return {"kind": kind, "tensor": tensor, "expected": expected, "found": found}
