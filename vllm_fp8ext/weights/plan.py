# SPDX-License-Identifier: Apache-2.0
"""Where each checkpoint tensor goes in this rank's model, learnt from the model's own `load_weights`.

The model's loader runs once on tensors without storage while every `copy_` is recorded instead of done. What it does to
names, fused layers, tensor-parallel shards and padding is thus known as a list of boxes, and an update needs to run no
model code at all: any tensor can come at any time, in any order, on any thread.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.weights.manifest import Piece, TensorSpec

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]


def trace(
    load_weights: LoadWeights,
    parameters: Mapping[str, Tensor],
    specs: Iterable[TensorSpec],
    *,
    quantized: frozenset[str],
    rank: int,
) -> dict[str, tuple[Piece, ...]]:
    """Pieces of each checkpoint tensor that this rank serves; none for a name that the model's loader skips.

    `parameters`: contiguous parameters by path, on any device, meta included. `quantized`: the paths of those that are
    served as codes and scales.

    Raises:
        ConfigError: naming every tensor that the loader computes on, permutes or can't load.
    """
    owners = {_storage(tensor): path for path, tensor in reversed(list(parameters.items()))}
    pieces: dict[str, tuple[Piece, ...]] = {}
    problems: list[str] = []
    for spec in specs:
        source = torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta")
        recorder = _Recorder(owners, _storage(source))
        try:
            with recorder:
                load_weights([(spec.name, source)])
            pieces[spec.name] = _merged(
                _piece(path, parameters[path], path in quantized, source, rank, *views)
                for path, *views in recorder.copies
                if views[0].numel()
            )
        except Exception as error:
            problems.append(f"{spec.name}: {error}")
    if problems:
        raise ConfigError("this model's weights can't be updated live:\n  " + "\n  ".join(problems))
    return pieces


class _Recorder(TorchDispatchMode):
    """Records `copy_` from views of one source into known storages instead of doing it."""

    def __init__(self, owners: Mapping[int, str], source: int) -> None:
        super().__init__()
        self.owners = owners
        self.source = source
        self.copies: list[tuple[str, Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        destination, source = args[0], args[1]
        owner = self.owners.get(_storage(destination))
        if owner is not None:
            if _storage(source) != self.source:
                raise ConfigError("the model's loader computes on it instead of copying it")
            self.copies.append((owner, source, destination))
        return destination


def _piece(
    path: str,
    parameter: Tensor,
    quantized: bool,
    whole: Tensor,
    rank: int,
    source: Tensor,
    destination: Tensor,
) -> Piece:
    if source.shape != destination.shape:
        raise ConfigError(f"shape {list(source.shape)} is broadcast to {list(destination.shape)}")
    box, place = _box(source, whole.shape), _box(destination, parameter.shape)
    if quantized and (len(place) != 2 or place[1] != (0, parameter.shape[1])):
        raise ConfigError("a part of the columns of a quantized layer comes alone")
    return Piece(
        rank=rank,
        target=path,
        target_shape=tuple(parameter.shape),
        source=box,
        origin=tuple(start for start, _ in place),
        quantized=quantized,
        dtype=str(parameter.dtype).removeprefix("torch."),
    )


def _merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Pieces that continue each other's rows, in the tensor and in the parameter, as one."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        rows = last.source[0][1] - last.source[0][0] if last and last.source else 0
        if (
            last
            and rows
            and (last.target, last.source[1:], last.origin[1:])
            == (piece.target, piece.source[1:], piece.origin[1:])
            and last.source[0][1] == piece.source[0][0]
            and last.origin[0] + rows == piece.origin[0]
        ):
            merged[-1] = replace(last, source=((last.source[0][0], piece.source[0][1]), *last.source[1:]))
        else:
            merged.append(piece)
    return tuple(merged)


def _box(view: Tensor, shape: torch.Size) -> tuple[tuple[int, int], ...]:
    """Start and stop per dimension of a view of a contiguous tensor of this shape."""
    if view.dim() != len(shape):
        raise ConfigError(f"shape {list(shape)} is reshaped to {list(view.shape)}")
    rest = view.storage_offset()
    step = shape.numel()
    box = []
    for size, stride, whole in zip(view.shape, view.stride(), shape, strict=True):
        step //= max(whole, 1)
        start, rest = divmod(rest, max(step, 1))
        if (size > 1 and stride != step) or start + size > whole:
            raise ConfigError(f"a view of shape {list(shape)} is permuted or strided")
        box.append((start, start + size))
    return tuple(box)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
