# SPDX-License-Identifier: Apache-2.0
"""Makes the manifest of one rank, by tracing the loader of its shadow."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.worker.alias_names import ModelNames, aliases_of
from vllm_fp8ext.update.worker.derived_tensors import derived_paths
from vllm_fp8ext.update.worker.load_trace import load_trace
from vllm_fp8ext.update.worker.reachable_tensors import identity_of, loadable_tensors
from vllm_fp8ext.update.worker.tensor_classes import NOT_LOADED, refuse


def rank_manifest(
    shadow: nn.Module, layers: Mapping[str, nn.Module], specs: list[TensorSpec], rank: int, names: ModelNames
) -> Manifest:
    """Return the manifest of a rank, as the copies of its loader tell it.

    `layers`: quantized layers by path. `specs`: tensors of the checkpoint.

    Raises:
        ConfigError: naming every tensor that can't be updated.
    """
    matrices = [
        (path, matrix) for path, layer in layers.items() for matrix in layer.quant_method.matrices(layer)
    ]
    quantized = {f"{path}.{matrix.name}": matrix.values for path, matrix in matrices}
    parameters = {f"{path}.{matrix.parameter}" for path, matrix in matrices}
    loadable = loadable_tensors(shadow, NOT_LOADED)
    elsewhere = parameters | derived_paths(shadow)
    plain = {path: tensor for path, tensor in loadable.items() if path not in elsewhere}

    def trace(specs: Iterable[TensorSpec]) -> dict[str, tuple[ShardSlice, ...]]:
        paths = frozenset(quantized)
        pieces = load_trace(shadow.load_weights, quantized | plain, specs, quantized=paths, rank=rank)
        _require_same_storages(loadable, loadable_tensors(shadow, NOT_LOADED))
        return pieces

    pieces = trace(specs)
    tied = names.tied(
        {name: [loadable.get(piece.target) for piece in parts] for name, parts in pieces.items()}, loadable
    )
    served = _last_written({name: parts for name, parts in pieces.items() if name not in tied})
    tensors = {spec.name: spec for spec in specs if spec.name in served}
    ignored = frozenset(spec.name for spec in specs if spec.name not in served and spec.name not in tied)
    (scale_format,) = {layer.quant_method.scale_format for layer in layers.values()} or {"fp32"}
    manifest = Manifest(tensors, ignored, served, scale_format, 1, tied)
    return replace(manifest, aliases=aliases_of(names.aliases(manifest, specs), manifest, trace))


def _last_written(pieces: Mapping[str, tuple[ShardSlice, ...]]) -> dict[str, tuple[ShardSlice, ...]]:
    """Return the tensors of which something is served: no later tensor is loaded over all of it."""
    last = {(piece.target, piece.origin): name for name, parts in pieces.items() for piece in parts}
    return {
        name: parts
        for name, parts in pieces.items()
        if any(last[piece.target, piece.origin] == name for piece in parts)
    }


def _require_same_storages(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` naming each tensor that a loader replaced by another one: no copy tells of it."""
    storages = {path: identity_of(tensor) for path, tensor in before.items()}
    replaced = [path for path, tensor in after.items() if identity_of(tensor) != storages.get(path)]
    refuse([f"{path}: the model's loader puts another tensor in its place" for path in replaced])
