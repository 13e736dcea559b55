# SPDX-License-Identifier: Apache-2.0
"""Tensors that an engine takes and how it serves them, as plain data: the contract between trainer, server and digests."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.numerics.layout import blocks
from vllm_fp8ext.update.contract.fused import (
    TAKEN_LAYOUT,
    TRANSPOSED,
    ExpertLayout,
    Fused,
    fused_experts,
    is_fused,
    stacked_problem,
)
from vllm_fp8ext.update.contract.kv_names import is_kv_scale
from vllm_fp8ext.update.contract.name_hints import Hints
from vllm_fp8ext.update.contract.shard_slice import (
    ShardSlice,
    in_whole_blocks,
    is_aligned,
    is_whole_blocks,
    missing_rows,
    piece_within,
    shard_slice_of,
)
from vllm_fp8ext.update.contract.tensor_slices import (
    Box,
    TensorSlice,
    covers,
    extents,
    intersection,
    parsed_slice,
    slice_name,
    slices_to_send,
    tensor_of,
)

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that an update may send; converted to the model's dtype first, as on load."""
CODES_DTYPE = "float8_e4m3fn"
"""The dtype of codes, for tensors that are taken quantized, together with their block scales."""


SCALES = "_scale_inv"
"""Suffix of the name of a weight's block scales, after the weight's name (DeepSeek's convention)."""


def scale_name(name: str) -> str:
    """Under which name the block scales of a weight travel: `….weight_scale_inv`."""
    return name + SCALES


def follows(name: str, before: str) -> bool:
    """Tell whether these are the block scales of the weight `before`: they go where it goes."""
    return name == scale_name(before)


def scales_beside(parts: Iterable[T], name: Callable[[T], str]) -> list[T]:
    """Order parts of a checkpoint: the block scales of a weight come right after it."""
    parts = list(parts)
    names = set(map(name, parts))
    scales: dict[str, list[T]] = {}
    others = []
    for part in parts:
        if name(part).endswith(SCALES) and name(part).removesuffix(SCALES) in names:
            scales.setdefault(name(part), []).append(part)
        else:
            others.append(part)
    return [each for part in others for each in (part, *scales.pop(scale_name(name(part)), ()))]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype (torch's name) of one checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True)
class Manifest:
    """Everything that a full update must bring, and every piece that is served of it."""

    tensors: Mapping[str, TensorSpec]
    """Required tensors by name."""
    ignored: frozenset[str]
    """Names that are accepted and not used (an `inv_freq`, say)."""
    pieces: Mapping[str, tuple[ShardSlice, ...]]
    """Slices by name, over all ranks."""
    scale_format: str
    world_size: int
    tied: Mapping[str, str] = field(default_factory=dict)
    """Embedding's name by the name of an output layer that is served as it. It may come, and must be equal."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names in `tensors`, `fused` or `tied` by those that the loader or transformers has."""

    @cached_property
    def fused(self) -> dict[str, Fused]:
        """Tensors that may come instead of all the matrices in them, by name."""
        return fused_experts({name: spec.shape for name, spec in self.tensors.items()})

    @cached_property
    def stacked(self) -> dict[str, ExpertLayout]:
        """How fused experts lie in the checkpoint that the engine was started on, by name. They may come in the other
        layout, too, where their shape tells."""
        return {
            name: "in_out" if any(piece.transposed for piece in self.pieces.get(name, ())) else "out_in"
            for name, spec in self.tensors.items()
            if len(spec.shape) == 3 and is_fused(name)
        }

    @cached_property
    def _wholes(self) -> dict[str, str]:
        """Fused tensors by the matrices that lie in them."""
        return {part: name for name, whole in self.fused.items() for part in whole.parts}

    @cached_property
    def _hints(self) -> Hints:
        return Hints((*self.tensors, *self.fused, *self.tied), self.ignored)

    def canonical(self, name: str) -> str:
        """Return the manifest's name of what comes under `name`, or the name itself. Block scales have other names where
        their weight has."""
        if not self.aliases:
            return name
        part = parsed_slice(name)
        if part is not None:
            return slice_name(self.canonical(part.tensor), part.box)
        known = self.aliases.get(name)
        if known is None and name.endswith(SCALES):
            known = scale_name(self.canonical(name.removesuffix(SCALES)))
        return known or name

    def unwrapped(self, name: str) -> str:
        """Return the known name without a trainer's wrappers, or the name itself."""
        known = self.canonical(name)
        if known in self.tensors or known in self.fused or known in self.tied or self.ignores(known):
            return name
        return self._hints.unwrapped(known) or name

    def renamed(self, specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
        """Yield these tensors under the names that this manifest has for them."""
        for spec in specs:
            name = self.canonical(spec.name)
            yield spec if name == spec.name else replace(spec, name=name)

    def other_forms(self, name: str) -> Sequence[str]:
        """Other names under which bytes of this tensor may come: its matrices, or the fused tensor that it lies in."""
        if name in self.fused:
            return self.fused[name].parts
        return (self._wholes[name],) if name in self._wholes else ()

    def parts(self, names: Iterable[str]) -> list[str]:
        """These names, with those of its matrices for each fused tensor."""
        parts: list[str] = []
        for name in names:
            whole = self.fused.get(name)
            if whole:
                parts += whole.parts
            else:
                parts.append(name)
        return parts

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape that a tensor, or a slice of one, must have; None if it is not taken."""
        part = parsed_slice(name)
        if part is not None:
            return extents(part.box) if part.tensor in self.tensors else None
        return self._shape_of_whole(name)

    def _shape_of_whole(self, name: str) -> tuple[int, ...] | None:
        whole, known = self.fused.get(name), self.tensors.get(self.tied.get(name, name))
        return whole.shape if whole else known.shape if known else None

    def ignores(self, name: str) -> bool:
        """Tell whether a tensor is accepted and not used: scales of the KV cache come from its policy, not from
        checkpoints."""
        return self._ignores_whole(tensor_of(name))

    def _ignores_whole(self, name: str) -> bool:
        return name in self.ignored or (is_kv_scale(name) and name not in self.tensors)

    def takes_codes(self, name: str) -> bool:
        """Tell whether a tensor may come as codes and block scales: everywhere its blocks are those that are served. Of a
        slice, which must be of whole blocks."""
        name = self.canonical(name)
        part = parsed_slice(name)
        if part is not None:
            return self.takes_codes(part.tensor) and is_whole_blocks(
                part.box, self.tensors[part.tensor].shape
            )
        spec, pieces = self.tensors.get(name), self.pieces.get(name, ())
        return spec is not None and bool(pieces) and all(is_aligned(piece, spec.shape) for piece in pieces)

    def dtype_of(self, name: str) -> "torch.dtype":
        """Return the dtype that a tensor is converted to before it is quantized: the model's."""
        import torch

        dtype = getattr(torch, self.pieces[tensor_of(self.canonical(name))][0].dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def scales_among(self, specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
        """Return by name the scales that tensors must bring which come as codes."""
        scales = {}
        for spec in specs:
            if spec.dtype == CODES_DTYPE and tensor_of(spec.name) in self.tensors:
                shape = tuple(blocks(size) for size in self.shape_of(spec.name) or ())
                scales[scale_name(spec.name)] = TensorSpec(scale_name(spec.name), shape, "float32")
        return scales

    def problems(
        self, specs: Iterable[TensorSpec], expert_layout: ExpertLayout | None = None
    ) -> list[dict[str, Any]]:
        """Everything wrong with tensors that an update brings together: unknown names, shapes and dtypes that differ, codes
        without their scales, fused experts that do not lie as they must. `expert_layout`: how the client says they lie."""
        specs = list(specs)
        scales = self.scales_among(specs)
        problems: list[dict[str, Any]] = [
            {"kind": "missing-scales", "tensor": name.removesuffix(SCALES), "expected": name}
            for name in sorted(scales.keys() - {spec.name for spec in specs})
        ]
        slices = {spec.name: part for spec in specs if (part := parsed_slice(spec.name))}
        for spec in specs:  # thousands, while an engine waits
            part = slices.get(spec.name)
            whole = part.tensor if part else spec.name
            if self._ignores_whole(whole):
                continue
            if part is not None and (wrong := slice_problem(self, part, spec, expert_layout)):
                problems.append({"tensor": spec.name, **wrong})
                continue
            scale = scales.get(spec.name)
            known = scale.shape if scale else extents(part.box) if part else self._shape_of_whole(whole)
            if known is None:
                problems.append({"kind": "unknown-tensor", "tensor": spec.name})
                meant = self._hints.meant(spec.name)
                if meant:
                    problems[-1]["detail"] = f"is {meant} meant?"
                continue
            stacked = self.stacked.get(spec.name)
            if stacked and spec.shape in (known, (known[0], known[2], known[1])):
                wrong = stacked_problem(known, spec.shape, stacked, expert_layout)
                problems += [{"tensor": spec.name, **wrong}] if wrong else []
            elif spec.shape != known:
                shapes = {"expected": list(known), "found": list(spec.shape)}
                problems.append({"kind": "wrong-shape", "tensor": spec.name, **shapes})
                if spec.name in self.fused and spec.shape == (known[0], known[2], known[1]):
                    problems[-1]["detail"] = TRANSPOSED
            elif spec.name in self.fused and (wrong := self.fused[spec.name].layout_problem(expert_layout)):
                problems.append({"tensor": spec.name, **wrong})
            if scale is None and spec.dtype in DTYPES and whole not in self._others:
                continue  # nearly all
            expected = [scale.dtype] if scale else self.dtypes_of(spec.name)
            if spec.dtype not in expected:
                problems.append(
                    {
                        "kind": "wrong-dtype",
                        "tensor": spec.name,
                        "expected": expected,
                        "found": spec.dtype,
                    }
                )
        return problems

    def dtypes_of(self, name: str) -> list[str]:
        """Dtypes in which a tensor may come: of integers, their own alone."""
        if tensor_of(name) in self._others:
            return [self.tensors[tensor_of(name)].dtype]
        return [*DTYPES, CODES_DTYPE] if self.takes_codes(name) else list(DTYPES)

    @cached_property
    def _others(self) -> frozenset[str]:
        """Tensors of integers."""
        return frozenset(
            name for name, spec in self.tensors.items() if spec.dtype.startswith(("int", "uint", "bool"))
        )

    def covered(self, boxes: Mapping[str, Sequence[Box]]) -> set[str]:
        """Return the tensors of which these boxes, which share nothing, hold all that is served."""
        return {
            name for name, theirs in boxes.items() if name in self.tensors and not self.lacking(name, theirs)
        }

    def lacking(self, name: str, boxes: Sequence[Box]) -> list[str]:
        """Return the slices of a tensor that are served, but not in these boxes."""
        sources = {piece.source for piece in self.pieces.get(name, ())}
        return [slice_name(name, source) for source in sorted(sources) if not covers(boxes, source)]

    @cached_property
    def by_target(self) -> dict[tuple[int, str], list[tuple[str, ShardSlice]]]:
        """Return pieces of quantized parameters with their tensors, by rank and parameter."""
        pieces: dict[tuple[int, str], list[tuple[str, ShardSlice]]] = defaultdict(list)
        for name, parts in self.pieces.items():
            for piece in parts:
                if piece.quantized:
                    pieces[piece.rank, piece.target].append((name, piece))
        return pieces

    def lacking_in_blocks(self, names: Iterable[str]) -> list[str]:
        """Return the slices that these lack to fill whole blocks of each parameter.

        The scale of a block is of all of its values. Some of it may come with another tensor, beside it in a fused layer.
        `names` share no elements.
        """
        begun: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        for name in names:
            part_of = parsed_slice(name)
            for piece in self.pieces.get(tensor_of(name), ()):
                part = piece_within(piece, part_of.box) if part_of else piece
                if part is not None and piece.quantized and not in_whole_blocks(part):
                    begun[piece.rank, piece.target].append((part.origin[0], part.origin[0] + part.extents[0]))
        lacking = {
            slice_name(name, box)
            for target, rows in begun.items()
            for name, piece in self.by_target[target]
            for box in missing_rows(piece, rows)
        }
        return sorted(lacking)

    def completed(self, names: Iterable[str]) -> set[str]:
        """Add to these tensors every other one of the same parameters, on any rank."""
        targets = {(piece.rank, piece.target) for name in names for piece in self.pieces.get(name, ())}
        beside = {
            name
            for name, pieces in self.pieces.items()
            if any((piece.rank, piece.target) in targets for piece in pieces)
        }
        return beside | (set(names) & self.tensors.keys())

    def as_dict(self, rank: int | None = None) -> dict[str, Any]:
        """Return the manifest as JSON has it. `rank`: what this rank serves alone; each tensor has then, in `slices`, the
        names under which that is sent."""
        if rank is not None:
            mine = {
                name: pieces
                for name, all_pieces in self.pieces.items()
                if (pieces := tuple(piece for piece in all_pieces if piece.rank == rank))
            }
            tensors = {name: self.tensors[name] for name in mine}
            shown = replace(self, tensors=tensors, pieces=mine).as_dict()
            for name, entry in shown["tensors"].items():
                sources = (piece.source for piece in mine[name])
                entry["takes_codes"] = self.takes_codes(name)
                whole = name in self.tied.values()
                entry["slices"] = [name] if whole else slices_to_send(name, entry["shape"], sources)
            return {**shown, "rank": rank, "fused": {}}
        return {
            "scale_format": self.scale_format,
            "world_size": self.world_size,
            "dtypes": [*DTYPES, CODES_DTYPE, *sorted({self.tensors[name].dtype for name in self._others})],
            "ignored": sorted(self.ignored),
            "expert_layout": TAKEN_LAYOUT,
            "tied": dict(sorted(self.tied.items())),
            "aliases": dict(sorted(self.aliases.items())),
            "fused": {name: list(whole.shape) for name, whole in sorted(self.fused.items())},
            "tensors": {
                name: {
                    "shape": list(spec.shape),
                    "dtype": spec.dtype,
                    "takes_codes": self.takes_codes(name),
                    "pieces": [asdict(piece) for piece in self.pieces.get(name, ())],
                }
                for name, spec in sorted(self.tensors.items())
            },
        }

    @classmethod
    def from_file(cls, file: Path) -> "Manifest":
        """A manifest that was saved as JSON.

        Raises:
            ValueError: a file that holds none.
        """
        try:
            return cls.from_dict(json.loads(file.read_text()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = (
                f"{file}: expected a server's manifest (GET /fp8ext/v1/weights/manifest) as JSON: {error!r}"
            )
            raise ValueError(message) from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Manifest":
        tensors = {
            name: TensorSpec(name, tuple(entry["shape"]), entry["dtype"])
            for name, entry in data["tensors"].items()
        }
        pieces = {
            name: tuple(shard_slice_of(piece) for piece in entry["pieces"])
            for name, entry in data["tensors"].items()
        }
        form, size = data["scale_format"], data["world_size"]
        also = {key: dict(data.get(key, {})) for key in ("tied", "aliases")}
        return cls(tensors, frozenset(data["ignored"]), pieces, form, size, **also)


def slice_problem(
    manifest: Manifest, part: TensorSlice, spec: TensorSpec, expert_layout: ExpertLayout | None
) -> dict[str, Any] | None:
    """Describe what is wrong with a slice that comes as `spec`, or return None."""
    name, box = part
    if name in manifest.fused or name in manifest.tied or name in manifest.tied.values():
        reason = "experts one by one, or all of them" if name in manifest.fused else "all of it"
        return {"kind": "wrong-slice", "expected": f"{reason} ({name})", "found": "a slice"}
    if name not in manifest.tensors:
        return {"kind": "unknown-tensor"}
    shape = manifest.tensors[name].shape
    whole = [[0, size] for size in shape]
    inside = len(box) == len(shape) and all(
        start < stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )
    if not inside:
        return {
            "kind": "wrong-slice",
            "expected": f"a box within {whole}",
            "found": [list(side) for side in box],
        }
    if spec.shape != extents(box):
        return {"kind": "wrong-shape", "expected": list(extents(box)), "found": list(spec.shape)}
    stacked = manifest.stacked.get(name)
    if stacked and expert_layout not in (None, stacked):
        return {"kind": "wrong-layout", "expected": stacked, "found": expert_layout}
    for piece in manifest.pieces.get(name, ()):
        shared = intersection(box, piece.source)
        if shared is None or not piece.quantized:
            continue
        of_piece = piece_within(piece, box)
        side = -2 if piece.transposed else -1
        if of_piece is None or shared[side] == piece.source[side] or in_whole_blocks(of_piece):
            continue
        dimension = len(box) + side
        expected = (
            f"all of {list(piece.source[side])} in dimension {dimension}, which rank {piece.rank} serves, or whole "
            "blocks of it"
        )
        return {"kind": "wrong-slice", "expected": expected, "found": list(box[side])}
    return None


def merge(parts: Iterable[Manifest]) -> Manifest:
    """One manifest of all ranks' own. What a rank ignores, another may take: an expert, or a layer of another pipeline stage.

    Raises:
        UpdateError: ranks disagree on what they are sent.
    """
    ranks = list(parts)
    first = ranks[0]
    tensors: dict[str, TensorSpec] = {}
    for rank in ranks:
        tensors |= rank.tensors
    for rank in ranks:
        if rank.scale_format != first.scale_format:
            raise _disagree(f"scale_format {first.scale_format} and {rank.scale_format}")
        for name in sorted(tensors):
            spec = rank.tensors.get(name, tensors[name] if name in rank.ignored else None)
            if spec != tensors[name]:
                raise _disagree(f"{name}: {_shown(tensors[name])} and {_shown(spec)}")
    pieces = {name: tuple(piece for rank in ranks for piece in rank.pieces.get(name, ())) for name in tensors}
    tied = {head: name for rank in ranks for head, name in rank.tied.items()}
    for rank in ranks:
        expected = {head: name for head, name in tied.items() if name in rank.tensors}
        if rank.tied != expected:
            raise _disagree(f"output layers that are served as the embedding: {rank.tied} and {expected}")
    ignored = frozenset.intersection(*(rank.ignored for rank in ranks))
    return Manifest(tensors, ignored, pieces, first.scale_format, len(ranks), tied, _agreed_aliases(ranks))


def _agreed_aliases(ranks: Sequence[Manifest]) -> dict[str, str]:
    """Return the aliases that a rank has which serves the tensor.

    Other ranks could not try them: theirs count where nobody serves it.
    """
    aliases = {alias: name for rank in ranks for alias, name in rank.aliases.items()}
    serving = {alias: [rank for rank in ranks if name in rank.tensors] for alias, name in aliases.items()}
    return {
        alias: name
        for alias, name in aliases.items()
        if not serving[alias] or any(alias in rank.aliases for rank in serving[alias])
    }


def _disagree(what: str) -> UpdateError:
    message = f"the ranks of this engine disagree on the tensors they take: {what}"
    return UpdateError("rank-mismatch", message, status=500)


def _shown(spec: TensorSpec | None) -> str:
    return f"{spec.dtype} {list(spec.shape)}" if spec else "nothing"
