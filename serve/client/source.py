# SPDX-License-Identifier: Apache-2.0
"""Weights that can be pushed, as chunks or as tensors."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from vllm_fp8ext.serve.client.flow import Flow, Work, work
from vllm_fp8ext.serve.client.lent import Pairs
from vllm_fp8ext.serve.safetensors_body import BodyBuilder, SafetensorsBody, bodies
from vllm_fp8ext.serve.safetensors_file import Range, ranges_of, snapshot_ranges
from vllm_fp8ext.serve.tensors import LentPart, TensorLike, TensorPart, tensor_parts
from vllm_fp8ext.update.contract.dtype_name import instance_of
from vllm_fp8ext.update.contract.file_versions import Snapshot

Pushable: TypeAlias = str | PathLike[str] | Mapping[str, TensorLike] | Iterable[tuple[str, TensorLike]]
"""Weights to push: a checkpoint's path, or tensors by name. A checkpoint is a folder of safetensors, or one file. Tensors are
torch's or numpy's, on any device. Those of a `dict` stay as they are until the push has ended. Any other iterable is gone
through once, on the caller's thread, and what it yields is copied before it is asked for more."""

Whole: TypeAlias = list[Range] | list[TensorPart | LentPart]


@dataclass(frozen=True)
class ChunkSource:
    """The parts of what is pushed: all of them, or an iterator that makes them as they are sent."""

    parts: Whole | Iterator[TensorPart | LentPart]
    snapshot: Snapshot | None = None
    """Versions of the files that the parts lie in."""

    def confirm(self) -> None:
        """Raise `file-changed` unless all parts, which have been read, were of one checkpoint."""
        if self.snapshot is not None:
            self.snapshot.require_unchanged()

    @property
    def whole(self) -> bool:
        """Return whether all parts are known."""
        return isinstance(self.parts, list)

    def chunks(self, limit: int) -> Iterator[SafetensorsBody | Work]:
        """The chunks, in order; each holds `limit` bytes of tensors at most, or one tensor. Work between them is to be done
        before more is asked for."""
        filling = BodyBuilder(limit)
        for part in self.parts:
            if complete := filling.add(part):
                yield complete
            if isinstance(part, LentPart):
                yield Work(part.keep)
            del part  # nothing holds a tensor while the next one is made
        if rest := filling.rest():
            yield rest

    def bodies(self, limit: int) -> Iterator[SafetensorsBody]:
        """The same where the parts are whole, or nothing is lent."""
        return bodies(self.parts, limit)

    def total(self, limit: int) -> int | None:
        """Bytes of all chunks, if that can be known."""
        return sum(body.length for body in self.bodies(limit)) if self.whole else None


Manifests: TypeAlias = Callable[[], Flow[list[dict[str, Any]]]]
"""Asks each server what it takes."""


def source_of(weights: Pushable, manifests: Manifests, *, fp8: bool = False) -> Flow[ChunkSource]:
    """The source, checked as far as it can be before a tensor is sent. `fp8`: what all servers take quantized is quantized
    here.

    Raises:
        ValueError: a checkpoint that can't be read, or a tensor that can't be sent.
    """
    _require_weights(weights)
    if isinstance(weights, str | PathLike) and not fp8:
        path = _resolved(weights)
        snapshot, ranges = yield from work(lambda: snapshot_ranges(path))
        return ChunkSource(ranges, snapshot)
    pairs = yield from _pairs(weights)
    served_manifests = yield from manifests()
    dtypes, ignored = _taken(served_manifests)
    if isinstance(weights, Mapping):
        ignored |= frozenset.intersection(
            *(_shared_heads(weights, manifest) for manifest in served_manifests)
        )
    parts = tensor_parts(_quantized(pairs, served_manifests) if fp8 else pairs, dtypes, ignored, pairs.lent)
    return ChunkSource(list(parts) if pairs.complete and not fp8 else parts)


@dataclass(frozen=True)
class Tensors:
    """Tensors for a server that reads them where they are, or copies of them. `lent`: whether a tensor is its owner's again
    when the next one is asked for. `complete`: whether all of them are there."""

    pairs: Iterable[tuple[str, TensorLike]]
    lent: Callable[[Any], bool]
    complete: bool


def tensors_of(weights: Pushable, manifests: Manifests, *, fp8: bool = False) -> Flow[Tensors]:
    """The tensors themselves. Arguments and errors as `source_of`'s."""
    _require_weights(weights)
    pairs = yield from _pairs(weights)
    if fp8:
        return Tensors(_quantized(pairs, (yield from manifests())), pairs.lent, complete=False)
    return Tensors(pairs, pairs.lent, pairs.complete)


def _resolved(path: str | PathLike[str]) -> Path:
    """Return where a path leads now. A link to the newest checkpoint may soon lead to another one."""
    return Path(os.path.realpath(path))


def _require_weights(weights: Any) -> None:
    if isinstance(weights, str | PathLike | Iterable):
        return
    hint = " (its .state_dict()?)" if hasattr(weights, "state_dict") else ""
    raise ValueError(
        "expected a checkpoint's path, a mapping of names to tensors, or an iterable of such pairs, found "
        f"{type(weights).__name__}{hint}"
    )


def _taken(manifests: list[dict[str, Any]]) -> tuple[list[str], frozenset[str]]:
    """Dtypes that all servers take, and names whose tensors none of them looks at."""
    first, *others = manifests
    dtypes = [name for name in first["dtypes"] if all(name in other["dtypes"] for other in others)]
    return dtypes, frozenset.intersection(*(frozenset(manifest["ignored"]) for manifest in manifests))


def _shared_heads(weights: Mapping[str, TensorLike], manifest: dict[str, Any]) -> frozenset[str]:
    """Return names of output layers that are the embedding, for the server and here. In one memory both are equal."""
    tied, aliases = manifest.get("tied", {}), manifest.get("aliases", {})
    names = {aliases.get(name, name): name for name in weights} if tied else {}
    return frozenset(
        names[head]
        for head, embedding in tied.items()
        if head in names
        and embedding in names
        and _same_memory(weights[names[head]], weights[names[embedding]])
    )


def _same_memory(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not (instance_of(one, "torch", "Tensor") and instance_of(other, "torch", "Tensor")):
        return False
    if hasattr(one, "full_tensor") or hasattr(other, "full_tensor") or one.is_meta or other.is_meta:
        return False  # they have no memory of their own to tell of
    places = [(part.data_ptr(), part.shape, part.stride(), part.dtype, part.device) for part in (one, other)]
    return places[0] == places[1]


def _pairs(weights: Pushable) -> Flow[Pairs]:
    if isinstance(weights, str | PathLike):
        from vllm_fp8ext.update.transports.wire import stored

        path = _resolved(weights)
        yield from work(lambda: ranges_of(path))  # for what is wrong with it
        return Pairs(stored(path), lending=False)
    return Pairs(weights)


def _quantized(pairs: Pairs, manifests: list[dict[str, Any]]) -> Iterator[tuple[str, TensorLike]]:
    """Quantize tensors for servers of these manifests. New ones are nobody else's: codes and scales are not lent."""
    from vllm_fp8ext.update.contract.manifest import Manifest
    from vllm_fp8ext.update.transports.wire import quantized, require_all_quantizable

    takers = [Manifest.from_dict(manifest) for manifest in manifests]
    if pairs.complete:  # what is wrong is told before an update is opened
        require_all_quantizable(pairs, *takers)
    return quantized(pairs, *takers)
