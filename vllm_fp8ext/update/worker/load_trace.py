# SPDX-License-Identifier: Apache-2.0
"""Traces the model's own `load_weights`: where each checkpoint tensor goes in this rank's model.

The model's loader runs once on tensors without storage while every `copy_` is recorded instead of done. What it does to
names, fused layers, tensor-parallel shards and padding is then known as a list of boxes. An update runs no model code: any
tensor can come at any time, in any order, on any thread.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_fp8ext.errors import ConfigError, no_live_updates
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]
RecordedCopy: TypeAlias = tuple[Tensor, Tensor]
"""Source and destination of a `copy_`."""


def load_trace(
    load_weights: LoadWeights,
    parameters: Mapping[str, Tensor],
    specs: Iterable[TensorSpec],
    *,
    quantized: frozenset[str],
    rank: int,
) -> dict[str, tuple[ShardSlice, ...]]:
    """Return the pieces of each checkpoint tensor that this rank serves.

    A name that the model's loader skips has none. `parameters`: contiguous parameters by path, on any device, meta included;
    of what is served in parts (experts), the parts, each a view of rows of its own. `quantized`: the paths of those that are
    served as codes and scales.

    Raises:
        ConfigError: naming every tensor that the loader computes on, permutes or can't load.
    """
    parameter_index = _ParameterIndex(parameters)
    sources = {spec.name: torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta") for spec in specs}

    def pieces(name: str, copies: Iterable[RecordedCopy]) -> tuple[ShardSlice, ...]:
        return _merged(
            _shard_slice(
                *parameter_index.find(destination), quantized, sources[name], rank, source, destination
            )
            for source, destination in copies
            if source.numel()
        )

    try:  # all at once: loaders take milliseconds before they begin, and there may be many thousand experts
        copies = _copies(load_weights, parameter_index, sources)
        return {name: pieces(name, copies[name]) for name in sources}
    except Exception:
        return _one_by_one(load_weights, parameter_index, sources, pieces)


def _one_by_one(
    load_weights: LoadWeights,
    parameter_index: "_ParameterIndex",
    sources: Mapping[str, Tensor],
    pieces: Callable[[str, Iterable[RecordedCopy]], tuple[ShardSlice, ...]],
) -> dict[str, tuple[ShardSlice, ...]]:
    """Trace one tensor at a time, so that every problem is named."""
    traced: dict[str, tuple[ShardSlice, ...]] = {}
    problems: list[str] = []
    for name, source in sources.items():
        try:
            traced[name] = pieces(name, _copies(load_weights, parameter_index, {name: source})[name])
        except Exception as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise no_live_updates(problems)
    return traced


def _copies(
    load_weights: LoadWeights, parameter_index: "_ParameterIndex", sources: Mapping[str, Tensor]
) -> dict[str, list[RecordedCopy]]:
    recorder = _CopyRecorder(parameter_index, sources)
    with recorder:
        load_weights(iter(sources.items()))  # some loaders look at the first ones and go on
    return recorder.copies


class _ParameterIndex:
    """Finds the parameter, or the part of one, that a view of it belongs to."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        by_offset: dict[int, dict[int, tuple[str, Tensor]]] = defaultdict(dict)
        for path, tensor in parameters.items():
            by_offset[_storage(tensor)].setdefault(tensor.storage_offset(), (path, tensor))
        self._parts = {storage: sorted(parts.items()) for storage, parts in by_offset.items()}

    def __contains__(self, view: Tensor) -> bool:
        return _storage(view) in self._parts

    def find(self, view: Tensor) -> tuple[str, Tensor]:
        """Return path and tensor."""
        parts = self._parts[_storage(view)]
        index = bisect_right(parts, view.storage_offset(), key=lambda part: part[0])
        return parts[max(index - 1, 0)][1]


class _CopyRecorder(TorchDispatchMode):
    """Records `copy_` from views of known sources into known storages instead of doing it.

    A whole source may be converted to the dtype of its destination first: `copy_` does the same. Copies of views that are
    made on the way stand for these views. A source that is set to zero has no part in what it is copied to.
    """

    def __init__(self, parameter_index: _ParameterIndex, sources: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.parameter_index = parameter_index
        self.sources = {_storage(source): name for name, source in sources.items()}
        self.copies: dict[str, list[RecordedCopy]] = {name: [] for name in sources}
        self._whole_sources = sources
        self._converted: list[Tensor] = []
        """Converted sources, held so that no other tensor gets the storage of one."""
        self._clones: dict[int, tuple[Tensor, Tensor]] = {}
        """Copies of views, and these views, by the storage of the copy."""
        self._zeroed: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            return self._convert(args[0], func(*args, **(kwargs or {})))
        if func is torch.ops.aten.clone.default:
            return self._clone(args[0], func(*args, **(kwargs or {})))
        if func is not torch.ops.aten.copy_.default:
            changed = args[0] if func._schema.is_mutable and args else None
            if isinstance(changed, Tensor) and _storage(changed) in self.sources:
                if func is not torch.ops.aten.zero_.default:
                    raise ConfigError("the model's loader computes on it instead of copying it")
                self._zeroed.add(_storage(changed))
            return func(*args, **(kwargs or {}))
        destination, source = args[0], args[1]
        if destination in self.parameter_index and _storage(source) not in self._zeroed:
            if _storage(source) in self._clones:
                source = _original(source, *self._clones[_storage(source)])
            name = self.sources.get(_storage(source))
            converted = name is not None and source.dtype != self._whole_sources[name].dtype
            if name is None or (converted and source.dtype != destination.dtype):
                raise ConfigError("the model's loader computes on it instead of copying it")
            self.copies[name].append((source, destination))
        return destination

    def _clone(self, view: Tensor, result: Tensor) -> Tensor:
        if _storage(view) in self.sources:
            self._clones[_storage(result)] = result, view
        return result

    def _convert(self, source: Tensor, result: Tensor) -> Tensor:
        name = self.sources.get(_storage(source))
        if (
            name is not None
            and source.dtype == self._whole_sources[name].dtype
            and _same_layout(source, self._whole_sources[name])
        ):
            self._converted.append(result)
            self.sources[_storage(result)] = name
        return result


def _original(part: Tensor, copy: Tensor, view: Tensor) -> Tensor:
    """Return the part of a view that a part of a copy of it is."""
    transposed = part.dim() > 1 and part.stride(-2) < part.stride(-1)
    box = _box(part.transpose(-1, -2) if transposed else part, copy)
    original = view[tuple(slice(*extent) for extent in box)]
    original = original[(0,) * (original.dim() - part.dim())]
    return original.transpose(-1, -2) if transposed else original


def _same_layout(view: Tensor, whole: Tensor) -> bool:
    return view.shape == whole.shape and view.stride() == whole.stride()


def _shard_slice(
    path: str,
    parameter: Tensor,
    quantized: frozenset[str],
    whole: Tensor,
    rank: int,
    source: Tensor,
    destination: Tensor,
) -> ShardSlice:
    if source.shape != destination.shape:
        raise ConfigError(f"shape {list(source.shape)} is broadcast to {list(destination.shape)}")
    transposed = whole.dim() > 2 and source.dim() > 1 and source.stride(-2) < source.stride(-1)
    source_box = _box(source.transpose(-1, -2) if transposed else source, whole)
    target_box = _box(destination, parameter)
    if path in quantized and (len(target_box) != 2 or target_box[1] != (0, parameter.shape[1])):
        raise ConfigError("a part of the columns of a quantized layer comes alone")
    return ShardSlice(
        rank=rank,
        target=path,
        target_shape=tuple(parameter.shape),
        source=source_box,
        origin=tuple(start for start, _ in target_box),
        quantized=path in quantized,
        dtype=str(parameter.dtype).removeprefix("torch."),
        transposed=transposed,
    )


def _merged(pieces: Iterable[ShardSlice]) -> tuple[ShardSlice, ...]:
    """Join pieces that continue each other's rows, in the tensor and in the parameter."""
    merged: list[ShardSlice] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        rows = last.source[0][1] - last.source[0][0] if last and last.source else 0
        if (
            last
            and rows
            and len(piece.source) == len(piece.origin)
            and (last.target, last.source[1:], last.origin[1:])
            == (piece.target, piece.source[1:], piece.origin[1:])
            and last.source[0][1] == piece.source[0][0]
            and last.origin[0] + rows == piece.origin[0]
        ):
            merged[-1] = replace(last, source=((last.source[0][0], piece.source[0][1]), *last.source[1:]))
        else:
            merged.append(piece)
    return tuple(merged)


def _box(view: Tensor, whole: Tensor) -> tuple[tuple[int, int], ...]:
    """Return start and stop per dimension of a view; the tensor's rows are contiguous. A view may lack first dimensions, of
    which it has one element."""
    if view.dim() > whole.dim() or (not view.dim() and whole.dim()):
        raise ConfigError(f"shape {list(whole.shape)} is reshaped to {list(view.shape)}")
    view = view[(None,) * (whole.dim() - view.dim())]
    rest = view.storage_offset() - whole.storage_offset()
    steps = torch.empty(whole.shape, device="meta").stride() if whole.is_contiguous() else whole.stride()
    box = []
    for size, stride, whole_size, step in zip(view.shape, view.stride(), whole.shape, steps, strict=True):
        start, rest = divmod(rest, max(step, 1))
        if (size > 1 and stride != step) or start < 0 or start + size > whole_size:
            raise ConfigError(f"a view of shape {list(whole.shape)} is permuted or strided")
        box.append((start, start + size))
    return tuple(box)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
