# SPDX-License-Identifier: Apache-2.0
"""Changes of a model's weights, as the slices that a sparse update brings. Imports no torch at module level."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_fp8ext.kernels.numerics.layout import BLOCK
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.contract.tensor_slices import Box, parsed_slice, slices_to_send

if TYPE_CHECKING:
    from torch import Tensor


def changed_slices(
    manifest: Mapping[str, Any], before: Mapping[str, "Tensor"], after: Mapping[str, "Tensor"]
) -> dict[str, "Tensor"]:
    """Return the slices, by name, in which two versions of a model's weights differ.

    `manifest`: of the server (`Client.manifest`). `before`: the weights that it serves. Both are whole tensors of the same
    names, shapes and dtypes. Of a quantized tensor that is every block row of 128 rows, as a rank serves it, in which any
    bit differs: the scale of a block is of all of its values. Of another one it is the whole tensor, and so of an embedding
    and the output layer that is served as it: both, where either differs. Nothing is copied.

    Raises:
        ValueError: a tensor that the server does not take, or that is of another shape or dtype than before; two names of one
            tensor.
    """
    taken = Manifest.from_dict(manifest)
    names: dict[str, str] = {}
    for name in after:
        known = names.setdefault(taken.canonical(name), name)
        if known != name:
            raise ValueError(f"tensor {name}: expected each tensor once, found {known}, which names it too")
    rows = {known: _changed_rows(name, before.get(name), after[name]) for known, name in names.items()}
    changed = {known for known, theirs in rows.items() if theirs.any()}
    shared = {*taken.tied, *taken.tied.values()}
    for pair in taken.tied.items():
        changed |= set(pair) if changed.intersection(pair) else set()
    boxes: dict[str, list[Box]] = defaultdict(list)
    for known, name in names.items():
        spec = taken.tensors.get(taken.tied.get(known, known))
        if spec is None and not taken.ignores(known):
            raise ValueError(f"tensor {name}: expected one of the manifest's, found another one")
        if spec is not None and known in changed and (known in shared or not _is_cut(taken, known)):
            boxes[known] = [tuple((0, size) for size in spec.shape)]
    for pieces in taken.by_target.values():
        cut = [(known, piece) for known, piece in pieces if _is_cut(taken, known)]
        for known, box in _boxes(cut, rows):
            boxes[known].append(box)
    slices = (
        (known, slice_name)
        for known, theirs in boxes.items()
        if known in names
        for slice_name in slices_to_send(known, taken.shape_of(known) or (), _joined(theirs))
    )
    return {name: _sliced(after[names[known]], name) for known, name in slices}


def _is_cut(manifest: Manifest, name: str) -> bool:
    """Tell whether a tensor is sent in block rows: a matrix that is quantized, and not turned."""
    pieces = manifest.pieces.get(name, ())
    shape = manifest.tensors[name].shape if name in manifest.tensors else ()
    return len(shape) == 2 and bool(pieces) and all(piece.quantized for piece in pieces)


def _changed_rows(name: str, before: "Tensor | None", after: "Tensor") -> "Tensor":
    """Return which rows of a tensor differ in any bit: bool, `[rows]`; one for a scalar."""
    import torch

    if before is None or before.shape != after.shape or before.dtype != after.dtype:
        was = "none" if before is None else f"{before.dtype} {list(before.shape)}"
        raise ValueError(f"tensor {name}: expected {was} as before, found {after.dtype} {list(after.shape)}")
    rows = after.shape[0] if after.dim() else 1
    one, other = (
        tensor.detach().contiguous().reshape(rows, -1).view(torch.uint8) for tensor in (before, after)
    )
    return (one != other.to(one.device)).any(1).cpu()


def _boxes(
    pieces: Sequence[tuple[str, ShardSlice]], rows: Mapping[str, "Tensor"]
) -> Iterator[tuple[str, Box]]:
    """Yield what of a parameter's tensors lies in block rows of which anything has changed."""
    changed: set[int] = set()
    for name, piece in pieces:
        if name in rows:
            (start, stop), origin = piece.source[0], piece.origin[0]
            changed |= {(origin + int(at)) // BLOCK for at in rows[name][start:stop].nonzero().flatten()}
    for index in sorted(changed):
        for name, piece in pieces:
            first, last = piece.origin[0], piece.origin[0] + piece.extents[0]
            top, bottom = max(first, index * BLOCK), min(last, (index + 1) * BLOCK)
            if top < bottom:
                shift = piece.source[0][0] - first
                yield name, ((top + shift, bottom + shift), *piece.source[1:])


def _joined(boxes: Sequence[Box]) -> Iterator[Box]:
    """Join boxes of the same columns whose rows continue each other, or are shared."""
    by_columns: dict[Box, list[tuple[int, int]]] = defaultdict(list)
    for rows, *columns in boxes:
        by_columns[tuple(columns)].append(rows)
    for others, extents in by_columns.items():
        start, stop = sorted(extents)[0]
        for first, last in sorted(extents)[1:]:
            if first > stop:
                yield ((start, stop), *others)
                start = first
            stop = max(stop, last)
        yield ((start, stop), *others)


def _sliced(tensor: "Tensor", name: str) -> "Tensor":
    part = parsed_slice(name)
    return tensor[tuple(slice(*side) for side in part.box)] if part else tensor
