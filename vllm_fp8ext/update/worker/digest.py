# SPDX-License-Identifier: Apache-2.0
"""Computes SHA-256 digests of served weights, from a live model or from a checkpoint alone.

There is one for each checkpoint tensor and rank.

A quantized piece's digest covers its codes (bytes, row by row) followed by the scales of every block that it touches
(little-endian fp32, row by row); any other piece's covers its values in the served dtype, row by row. A tensor that a rank
serves in several pieces has the SHA-256 of their hexadecimal digests, in the manifest's order. Digests are taken of the
canonical layout, so they do not depend on the kernel that serves it. Importing this needs no vLLM.
"""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.numerics.reference import BLOCK, FP8_DTYPE, NonFiniteError, ScaleFormat
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.layers.unquantized_layers import in_encoder, unfit
from vllm_fp8ext.update.contract.checkpoint_files import checkpoint_files
from vllm_fp8ext.update.contract.claims import repeated
from vllm_fp8ext.update.contract.file_versions import Snapshot
from vllm_fp8ext.update.contract.fused import ExpertLayout, is_fused
from vllm_fp8ext.update.contract.kv_names import is_kv_scale
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, Manifest, TensorSpec, scale_name
from vllm_fp8ext.update.contract.safetensors_header import file_tensors
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.contract.update_errors import incomplete, refusal
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.stager import Stager
from vllm_fp8ext.update.worker.staging_steps import StagingInput, destination_of
from vllm_fp8ext.update.worker.verdicts import ScaleError, VerdictTable

Digests = dict[str, dict[str, str]]
"""Hexadecimal digests by checkpoint name, then by rank (a string, as in JSON)."""

QUANTIZED_SUFFIXES = tuple(
    f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down", "qkv", "gate_up")
)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EXPERT = re.compile(r"\.experts\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight$")
"""A matrix of an expert: it has blocks of its own."""


def digest(piece: ShardSlice, values: Tensor, scales: Tensor | None) -> str:
    """Return the digest of one piece of a served parameter: `values` are its codes when it is quantized."""
    sha = hashlib.sha256(_bytes(destination_of(values, piece)))
    if scales is not None:
        first = piece.origin[0]
        last = first + piece.extents[0]
        sha.update(_bytes(scales[first // BLOCK : -(-last // BLOCK)]))
    return sha.hexdigest()


def checkpoint_digests(
    directory: Path,
    manifest: Manifest | None = None,
    progress: Callable[[int, int], None] | None = None,
    expert_layout: ExpertLayout | None = None,
) -> Digests:
    """Return the digests that a server with this manifest has after it took this checkpoint.

    The checkpoint holds values, or codes with their block scales, which stay as they are. Experts may be fused;
    `expert_layout` says how they lie, where their shape does not.

    Without a manifest, that of a server with one rank, fp32 scales and no ignored layers is derived from the checkpoint's
    names, in which experts must not be fused. `progress` is called with tensors done and tensors in all.

    Raises:
        UpdateError: the checkpoint is not one that the manifest takes; `file-changed`: it was changed meanwhile.
    """
    real = Path(os.path.realpath(directory))
    snapshot = Snapshot.of(real)
    stored = checkpoint_index(real)
    if manifest is None:
        manifest = default_manifest(spec for spec, _ in stored.values())
    index = _unfused(stored, manifest)
    problems = repeated(stored, manifest)
    problems += manifest.problems(manifest.renamed(spec for spec, _ in stored.values()), expert_layout)
    missing = sorted(manifest.tensors.keys() - index.keys())
    if missing:
        raise incomplete(missing, len(manifest.tensors), problems, what=str(directory))
    problems = problems or _tied_problems(index, manifest)
    if problems:
        raise refusal(problems)
    members: dict[tuple[int, str], dict[str, list[ShardSlice]]] = defaultdict(lambda: defaultdict(list))
    for name, pieces in manifest.pieces.items():
        for piece in pieces:
            members[piece.rank, piece.target][name].append(piece)
    by_piece: dict[tuple[str, ShardSlice], str] = {}
    for count, group in enumerate(members.values()):
        by_piece |= _target_digests(group, index, manifest)
        if progress:
            progress(count + 1, len(members))
    snapshot.require_unchanged()
    return {
        name: {
            str(rank): combine([by_piece[name, piece] for piece in pieces if piece.rank == rank])
            for rank in sorted({piece.rank for piece in pieces})
        }
        for name, pieces in sorted(manifest.pieces.items())
    }


def combine(digests: list[str]) -> str:
    """Return the digest of a tensor from those of its pieces on one rank."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def checkpoint_index(directory: Path) -> dict[str, tuple[TensorSpec, Path]]:
    """List every tensor of a checkpoint's folder (or of one safetensors file), by name.

    Raises:
        UpdateError: no such files, a broken file, or a name that occurs twice.
    """
    index: dict[str, tuple[TensorSpec, Path]] = {}
    for file in checkpoint_files(directory):
        for stored in file_tensors(file):
            spec = stored.spec
            if spec.name in index:
                raise UpdateError(
                    "duplicate-tensor", f"{spec.name} is in {index[spec.name][1]} and in {file}", status=422
                )
            index[spec.name] = (spec, file)
    return index


@dataclass(frozen=True, slots=True)
class _StoredMatrix:
    """The name and the file of a stored tensor; of a fused one, `number` says which of its matrices of `rows` rows."""

    file: Path
    name: str
    rows: int = 0
    number: int | None = None

    def read(self) -> Tensor:
        with safe_open(self.file, framework="pt") as reader:
            if self.number is None:
                return cast("Tensor", reader.get_tensor(self.name))
            whole = reader.get_slice(self.name)
            expert, matrix = divmod(self.number * self.rows, whole.get_shape()[1])
            return cast("Tensor", whole[expert : expert + 1, matrix : matrix + self.rows][0])


def _unfused(index: Mapping[str, tuple[TensorSpec, Path]], manifest: Manifest) -> dict[str, _StoredMatrix]:
    """Find where each tensor is read, by the manifest's name for it."""
    matrices: dict[str, _StoredMatrix] = {}
    known = {manifest.canonical(name) for name in index}
    for name, (spec, file) in index.items():
        whole = manifest.fused.get(manifest.canonical(name))
        if whole is None or whole.shape != spec.shape:
            matrices[manifest.canonical(name)] = _StoredMatrix(file, name)
            continue
        both = sorted(known & set(whole.parts))
        if both:
            raise UpdateError("duplicate-tensor", f"{both[0]} comes both alone and in {name}", status=422)
        rows = manifest.tensors[whole.parts[0]].shape[0]
        matrices |= {part: _StoredMatrix(file, name, rows, number) for number, part in enumerate(whole.parts)}
    return matrices


def _tied_problems(index: Mapping[str, _StoredMatrix], manifest: Manifest) -> list[dict[str, Any]]:
    """List output layers that are not equal to the embedding that is served as them."""
    problems: list[dict[str, Any]] = []
    for head, embedding in manifest.tied.items():
        if head in index and embedding in index:
            dtype = manifest.dtype_of(embedding)
            first, second = (index[name].read().to(dtype) for name in (head, embedding))
            if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
                detail = f"differs from {embedding}, which is served as it"
                problems.append({"kind": "tied-differs", "tensor": head, "detail": detail})
    return problems


def default_manifest(specs: Iterable[TensorSpec]) -> Manifest:
    """Return the manifest of a one-rank server of a Llama- or Qwen-like checkpoint.

    Its settings are the default ones. Projections are quantized, q/k/v and gate/up in one matrix each, and those of experts,
    each alone; everything else is served as it is, and so are projections that `_kept` names.

    Raises:
        UpdateError: `wrong-form`: fused experts, whose matrices only a server's manifest names.
    """
    listed = {spec.name: spec for spec in specs}
    fused = sorted(name for name in listed if is_fused(name))
    if fused:
        message = f"{fused[0]}: what the matrices of fused experts are called only a server's manifest says: expected one"
        raise UpdateError("wrong-form", message, status=422)
    scales = {scale_name(name) for name, spec in listed.items() if spec.dtype == CODES_DTYPE}
    tensors = {name: spec for name, spec in listed.items() if name not in scales and not is_kv_scale(name)}
    pieces: dict[str, tuple[ShardSlice, ...]] = {}
    for name, spec in tensors.items():
        if not name.endswith(QUANTIZED_SUFFIXES) and not EXPERT.search(name):
            pieces[name] = (_whole(name, spec, False, spec.shape, 0),)
            continue
        parts = [tensors[part] for part in _fused(name) if part in tensors]
        rows = [part.shape[0] for part in parts]
        position = parts.index(spec)
        shape = (sum(rows), spec.shape[1])
        quantized = bool(EXPERT.search(name)) or scale_name(name) in scales or not _kept(name, shape, spec)
        pieces[name] = (_whole(parts[0].name, spec, quantized, shape, sum(rows[:position])),)
    return Manifest(tensors, frozenset(), pieces, "fp32", 1)


def _kept(name: str, shape: tuple[int, int], spec: TensorSpec) -> bool:
    return in_encoder(name) or unfit(*shape, _served(spec)) is not None


def _served(spec: TensorSpec) -> str:
    return "float16" if spec.dtype == "float16" else "bfloat16"


def _fused(name: str) -> tuple[str, ...]:
    if EXPERT.search(name):
        return (name,)
    for group in FUSED:
        for part in group:
            if name.endswith(f"{part}.weight"):
                return tuple(name.replace(f"{part}.weight", f"{other}.weight") for other in group)
    return (name,)


def _whole(target: str, spec: TensorSpec, quantized: bool, shape: tuple[int, ...], first: int) -> ShardSlice:
    return ShardSlice(
        rank=0,
        target=target,
        target_shape=shape,
        source=tuple((0, size) for size in spec.shape),
        origin=(first, *(0 for _ in spec.shape[1:])),
        quantized=quantized,
        dtype=_served(spec),
    )


def _target_digests(
    group: Mapping[str, list[ShardSlice]], index: Mapping[str, _StoredMatrix], manifest: Manifest
) -> dict[tuple[str, ShardSlice], str]:
    """Compute the digests of the pieces of one parameter of one rank."""
    first = next(iter(group.values()))[0]
    dtype = getattr(torch, first.dtype)
    values: Tensor = torch.zeros(first.target_shape, dtype=dtype)
    scales: Tensor | None = None
    quantized: dict[str, QuantizedTarget] = {}
    if first.quantized:
        values, scales = quantize_weight.empty_like(values)
        scale_format = cast("ScaleFormat", manifest.scale_format)
        quantized[first.target] = QuantizedTarget(values, scales, dtype, scale_format)
    pieces = {name: tuple(parts) for name, parts in group.items()}
    stacked = {name: manifest.tensors[name].shape for name in group if name in manifest.stacked}
    stager = Stager(pieces, quantized, {first.target: values}, stacked=stacked)
    for name in group:
        tensor = index[name].read()
        block_scales = index[scale_name(name)].read() if tensor.dtype == FP8_DTYPE else None
        table = VerdictTable()
        stager.stage(StagingInput(name, tensor, scales=block_scales), table)
        try:
            table.only()
        except NonFiniteError as error:
            raise UpdateError("non-finite", f"{name}: {error}", status=422) from None
        except ScaleError as error:
            raise UpdateError("wrong-scales", f"{name}: {error}", status=422) from None
    return {(name, piece): digest(piece, values, scales) for name, parts in pieces.items() for piece in parts}


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
