# SPDX-License-Identifier: Apache-2.0
"""What can be pushed, as chunks."""

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from vllm_fp8ext.serve.client.flow import Flow, work
from vllm_fp8ext.serve.safetensors_body import Body, Part, bodies
from vllm_fp8ext.serve.safetensors_file import ranges_of
from vllm_fp8ext.serve.tensors import TensorLike, tensor_parts

Pushable: TypeAlias = str | PathLike[str] | Mapping[str, TensorLike] | Iterable[tuple[str, TensorLike]]
"""A checkpoint (a folder of safetensors, or one file), or torch tensors or numpy arrays by name, on any device. An iterable
is gone through once, on the caller's thread, and no further than one tensor beyond the chunks under way."""


@dataclass(frozen=True)
class Source:
    """The parts of what is pushed: all of them, or an iterator that makes them as they are sent."""

    parts: list[Part] | Iterator[Part]
    files: bool
    """Whether the parts are files, so that another process finds the same chunks in them."""

    def chunks(self, limit: int) -> Iterator[Body]:
        """The chunks, in order; each holds `limit` bytes of tensors at most, or one tensor."""
        return bodies(self.parts, limit)

    def total(self, limit: int) -> int | None:
        """Bytes of all chunks, if that can be known."""
        known = isinstance(self.parts, list)
        return sum(body.length for body in self.chunks(limit)) if known else None


Manifests: TypeAlias = Callable[[], Flow[list[dict[str, Any]]]]
"""Asks each server what it takes."""


def source_of(weights: Pushable, manifests: Manifests, *, fp8: bool = False) -> Flow[Source]:
    """The source, checked as far as it can be before a tensor is sent. `fp8`: what all servers take quantized is quantized
    here.

    Raises:
        ValueError: a checkpoint that can't be read, or a tensor that can't be sent.
    """
    _require_weights(weights)
    if fp8:
        found = yield from manifests()
        pairs = _quantized((yield from _pairs(weights)), found)
        return Source(tensor_parts(pairs, *_taken(found)), files=False)
    if isinstance(weights, str | PathLike):
        path = Path(weights)
        return Source(list((yield from work(lambda: ranges_of(path)))), files=True)
    dtypes, ignored = _taken((yield from manifests()))
    if isinstance(weights, Mapping):
        return Source(list(tensor_parts(weights.items(), dtypes, ignored)), files=False)
    return Source(tensor_parts(weights, dtypes, ignored), files=False)


def tensors_of(
    weights: Pushable, manifests: Manifests, *, fp8: bool = False
) -> Flow[Iterable[tuple[str, TensorLike]]]:
    """The tensors themselves, for a server that reads them where they are. Arguments and errors as `source_of`'s."""
    _require_weights(weights)
    pairs = yield from _pairs(weights)
    return _quantized(pairs, (yield from manifests())) if fp8 else pairs


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


def _pairs(weights: Pushable) -> Flow[Iterable[tuple[str, TensorLike]]]:
    if isinstance(weights, str | PathLike):
        from vllm_fp8ext.weights.wire import stored

        path = Path(weights)
        yield from work(lambda: ranges_of(path))  # for what is wrong with it
        return stored(path)
    return weights.items() if isinstance(weights, Mapping) else weights


def _quantized(
    pairs: Iterable[tuple[str, TensorLike]], manifests: list[dict[str, Any]]
) -> Iterator[tuple[str, TensorLike]]:
    from vllm_fp8ext.weights.manifest import Manifest
    from vllm_fp8ext.weights.wire import quantized, require_all_quantizable

    takers = [Manifest.from_dict(manifest) for manifest in manifests]
    if isinstance(pairs, ItemsView):  # all there: what is wrong is told before an update is opened
        require_all_quantizable(pairs, *takers)
    return quantized(pairs, *takers)
