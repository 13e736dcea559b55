# SPDX-License-Identifier: Apache-2.0
"""Claims of a client about the tensors that it will send."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_fp8ext.update.contract.fused import ExpertLayout
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, DTYPES, SCALES, Manifest, TensorSpec
from vllm_fp8ext.update.contract.tensor_slices import overlapping


@dataclass(frozen=True, slots=True)
class Claim:
    """Shape, dtype (torch's name) and SHA-256 of one tensor's raw bytes, as far as claimed."""

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    sha256: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Claim":
        shape = data.get("shape")
        return cls(None if shape is None else tuple(shape), data.get("dtype"), data.get("sha256"))


def opening_problems(
    claims: Mapping[str, Claim], manifest: Manifest, expert_layout: ExpertLayout | None = None
) -> list[dict[str, Any]]:
    """Everything wrong with claims before a byte is sent: what they name must fit the manifest. Of what is not told anything
    may be true that fits."""
    scaled = {name.removesuffix(SCALES) for name in claims if name.endswith(SCALES)}
    codes = sorted(name for name in scaled if manifest.takes_codes(name))
    specs = {}
    for name in (*claims, *codes):
        dtype = CODES_DTYPE if name in codes else DTYPES[0]
        specs[name] = _filled(claims, TensorSpec(name, manifest.shape_of(name) or (), dtype))
    for name, scale in manifest.scales_among(specs.values()).items():
        specs[name] = _filled(claims, scale)
    return manifest.problems(specs.values(), expert_layout)


def repeated(names: Iterable[str], manifest: Manifest) -> list[dict[str, Any]]:
    """A problem for each name whose tensor another one names too."""
    first: dict[str, str] = {}
    problems = []
    for name in names:
        known = first.setdefault(manifest.canonical(name), name)
        if known != name:
            problems.append({"kind": "duplicate-tensor", "tensor": name, "detail": f"{known} names it too"})
    return problems


def claim_problems(
    claims: Mapping[str, Claim], specs: Iterable[TensorSpec], manifest: Manifest
) -> list[dict[str, Any]]:
    """Report tensors of a chunk that differ from what was claimed of them. They may also come in a form in which a claimed
    SHA-256 can't be checked: an expert's matrices fused, or one by one, or other slices of a tensor."""
    problems: list[dict[str, Any]] = []
    specs = list(specs) if claims else []
    hashed = [name for name, claim in claims.items() if claim.sha256]
    shared = overlapping((spec.name for spec in specs), hashed) if hashed else {}
    for spec in specs:
        claim = claims.get(spec.name, Claim())
        if claim.shape is not None and claim.shape != spec.shape:
            problems.append(_problem("wrong-shape", spec.name, list(claim.shape), list(spec.shape)))
        if claim.dtype is not None and claim.dtype != spec.dtype:
            problems.append(_problem("wrong-dtype", spec.name, claim.dtype, spec.dtype))
        for form in (*manifest.other_forms(spec.name), *([shared[spec.name]] if spec.name in shared else ())):
            if form in claims and claims[form].sha256:
                names = {"expected": form, "found": spec.name}
                problems.append({"kind": "wrong-form", "tensor": spec.name, **names})
                break
    return problems


def _filled(claims: Mapping[str, Claim], known: TensorSpec) -> TensorSpec:
    """Fill in a claim: what it leaves out is as it is known."""
    claim = claims.get(known.name, Claim())
    shape = known.shape if claim.shape is None else claim.shape
    return TensorSpec(known.name, shape, claim.dtype or known.dtype)


def _problem(kind: str, tensor: str, expected: Any, sent: Any) -> dict[str, Any]:
    return {"kind": kind, "tensor": tensor, "expected": expected, "found": sent}
