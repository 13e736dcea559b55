# SPDX-License-Identifier: Apache-2.0
"""What an engine takes and how it serves it, as plain data: the contract between trainer, server and digests."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_fp8ext.errors import UpdateError

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that an update may send; converted to the model's dtype first, as on load."""


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


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one checkpoint tensor that one rank serves, and where it lies in that rank's parameter.

    `source`: start and stop in each dimension of the checkpoint tensor. `origin`: its first element in the parameter
    `target` of shape `target_shape`. `quantized`: served as codes with one scale per 128x128 block of the parameter, whose
    blocks start at the parameter's origin; otherwise as values of `dtype`.
    """

    rank: int
    target: str
    target_shape: tuple[int, ...]
    source: tuple[tuple[int, int], ...]
    origin: tuple[int, ...]
    quantized: bool
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """Everything that a full update must bring, and every piece that is served of it."""

    tensors: Mapping[str, TensorSpec]
    """Required tensors by name."""
    ignored: frozenset[str]
    """Names that are accepted and not used (a tied lm_head, say)."""
    pieces: Mapping[str, tuple[Piece, ...]]
    """By name, over all ranks."""
    scale_format: str
    world_size: int

    def problems(self, specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
        """Everything wrong with tensors that an update brings: unknown names, shapes and dtypes that differ."""
        found: list[dict[str, Any]] = []
        for spec in specs:
            if spec.name in self.ignored:
                continue
            known = self.tensors.get(spec.name)
            if known is None:
                found.append({"kind": "unknown-tensor", "tensor": spec.name})
                continue
            if spec.shape != known.shape:
                found.append(
                    {
                        "kind": "wrong-shape",
                        "tensor": spec.name,
                        "expected": list(known.shape),
                        "found": list(spec.shape),
                    }
                )
            if spec.dtype not in DTYPES:
                found.append(
                    {
                        "kind": "wrong-dtype",
                        "tensor": spec.name,
                        "expected": list(DTYPES),
                        "found": spec.dtype,
                    }
                )
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "scale_format": self.scale_format,
            "world_size": self.world_size,
            "dtypes": list(DTYPES),
            "ignored": sorted(self.ignored),
            "tensors": {
                name: {
                    "shape": list(spec.shape),
                    "dtype": spec.dtype,
                    "pieces": [asdict(piece) for piece in self.pieces.get(name, ())],
                }
                for name, spec in sorted(self.tensors.items())
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Manifest":
        tensors = {
            name: TensorSpec(name, tuple(entry["shape"]), entry["dtype"])
            for name, entry in data["tensors"].items()
        }
        pieces = {
            name: tuple(_piece(piece) for piece in entry["pieces"]) for name, entry in data["tensors"].items()
        }
        return cls(tensors, frozenset(data["ignored"]), pieces, data["scale_format"], data["world_size"])


def merge(parts: Iterable[Manifest]) -> Manifest:
    """One manifest of all ranks' own.

    Raises:
        UpdateError: ranks disagree on what they take.
    """
    ranks = list(parts)
    first = ranks[0]
    for other in ranks[1:]:
        if other.tensors != first.tensors or other.scale_format != first.scale_format:
            raise UpdateError(
                "rank-mismatch", "the ranks of this engine disagree on the tensors they take", status=500
            )
    pieces = {
        name: tuple(piece for rank in ranks for piece in rank.pieces.get(name, ())) for name in first.tensors
    }
    ignored = frozenset.intersection(*(rank.ignored for rank in ranks))
    return Manifest(first.tensors, ignored, pieces, first.scale_format, len(ranks))


def _piece(data: Mapping[str, Any]) -> Piece:
    return Piece(
        rank=data["rank"],
        target=data["target"],
        target_shape=tuple(data["target_shape"]),
        source=tuple((start, stop) for start, stop in data["source"]),
        origin=tuple(data["origin"]),
        quantized=data["quantized"],
        dtype=data["dtype"],
    )
