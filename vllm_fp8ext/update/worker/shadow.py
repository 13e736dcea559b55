# SPDX-License-Identifier: Apache-2.0
"""The second copy of a rank's weights: what may differ between live and twin, and what is exchanged. In place, it is a second
module tree over the same memory.

Every tensor reachable from the two module trees is classified at start: *exchanged* (it holds checkpoint weights), *shared*
(one storage serves both), *constant* (equal in both, never loaded), *derived* (rebuilt from exchanged ones), or KV-cache
state. Anything else refuses the start: an update that forgets a tensor would serve a mixture.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from vllm_fp8ext.errors import ConfigError, no_live_updates
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.layers.block_matrix import served_matrices, tensor_paths
from vllm_fp8ext.layers.experts import DEQUANTIZED, BlockFp8ExpertsMethod
from vllm_fp8ext.layers.linear import BlockFp8LinearMethod
from vllm_fp8ext.update.contract.manifest import Manifest, ShardSlice, TensorSpec
from vllm_fp8ext.update.contract.update_errors import refusal
from vllm_fp8ext.update.worker.alias_names import ModelNames, aliases_of
from vllm_fp8ext.update.worker.load_trace import load_trace
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.reachable_tensors import (
    identity_of,
    lies_in,
    loadable_tensors,
    parameters_of,
    reachable_tensors,
    storage_of,
    tensor_at,
)
from vllm_fp8ext.update.worker.same_bytes import same_bytes
from vllm_fp8ext.update.worker.stager import Stager
from vllm_fp8ext.update.worker.staging_steps import destination_of
from vllm_fp8ext.update.worker.weight_swap import WeightSwap

_KV_STATE = frozenset(
    f"_{name}_scale{suffix}" for name in ("q", "k", "v", "prob") for suffix in ("", "_cpu", "_float")
) | {"kv_cache"}
"""Tensors of an attention layer that belong to its KV cache, not to the weights."""
_NOT_LOADED = _KV_STATE | frozenset({"dequantized", *DEQUANTIZED})
"""Tensors of modules that no loader writes: the KV cache's, and what is derived from others."""
_KV_PARAMETERS = frozenset(f"{name}_scale" for name in ("q", "k", "v", "prob"))
"""Placeholders of an attention layer into which a checkpoint's scales are loaded; the live model has consumed them."""


class Twin:
    """The twin of one rank, ready to be staged into and exchanged."""

    def __init__(
        self,
        live: nn.Module,
        twin: nn.Module,
        specs: Iterable[TensorSpec],
        rank: int,
        names: ModelNames | None = None,
        *,
        inplace: bool = False,
    ) -> None:
        self.live = live
        self.model = twin
        _drop_kv_placeholders(twin)
        layers = dict(_quantized_layers(twin))
        names = names or ModelNames()
        found = _trace(twin, layers, list(specs), rank, names)
        pieces = found.pieces
        quantized: dict[str, QuantizedTarget] = {}
        self.scale_format = cast("ScaleFormat", found.scale_format)
        device = next(live.parameters()).device
        for path, layer in layers.items():
            dtypes = {part.name: part.values.dtype for part in layer.quant_method.matrices(layer)}
            if inplace:
                layer.quant_method.adopt_from(layer, live.get_submodule(path))
            else:
                layer.quant_method.allocate(layer, device)
            for part in layer.quant_method.matrices(layer):
                assert part.scales is not None
                quantized[f"{path}.{part.name}"] = QuantizedTarget(
                    part.values, part.scales, dtypes[part.name], self.scale_format
                )
        self._served = list(_quantized_layers(live))  # to look for them takes milliseconds
        self._parts = served_matrices(self._served)
        holding = tensor_paths(self._parts, self._parts)
        targets, parameters = _targets(pieces), parameters_of(twin)
        own = {
            path: tensor
            for path, tensor in loadable_tensors(twin, _NOT_LOADED).items()
            if path not in holding and (path in targets or path in parameters)
        }
        if inplace:
            for path, tensor in own.items():
                tensor.data = tensor_at(live, path).data
        plain = {path: tensor.data for path, tensor in own.items()}
        self.stager = Stager(pieces, quantized, plain, found.tied)
        self._holders = tensor_paths(targets, self._parts)
        groups, pairs = _pairs(live, twin, self._holders, inplace)
        self._groups = groups
        self._constants: dict[str, Tensor] = {}
        self.exchange = WeightSwap(pairs, inplace=inplace)
        self.manifest = found

    def keep_others(self, names: Iterable[str]) -> None:
        """Copy from live what holds nothing of these checkpoint tensors. On any thread, while nothing is exchanged.

        Raises:
            UpdateError: `tied-differs`: an output layer came without the embedding that is served as it, and is not equal.
        """
        if self.exchange.inplace:
            return
        names = set(names)
        self._require_served(
            head for head, embedding in self.manifest.tied.items() if head in names and embedding not in names
        )
        targets = {piece.target for name in names for piece in self.stager.pieces.get(name, ())}
        touched = tensor_paths(targets, self._parts)
        for paths, (live, twin) in zip(self._groups, self.exchange.pairs, strict=True):
            if not paths & touched:
                twin.copy_(live)
        for target, part in self._parts.items():
            if target not in targets and touched.intersection(part.paths):  # beside other experts
                staged = self.stager.quantized[target]
                staged.codes.copy_(part.codes)
                staged.scales.copy_(part.scales)

    def require_equal(self, heads: Mapping[str, Tensor]) -> None:
        """Require that output layers of the checkpoint equal the embedding that is served as them.

        Raises:
            ConfigError: naming those that differ.
        """
        differ = [
            f"{head}: differs from {embedding}, which this model serves as it: expected both equal, or no {head}"
            for head, embedding in self.manifest.tied.items()
            if head in heads
            for piece in self.manifest.pieces[embedding]
            if heads[head].shape != self.manifest.tensors[embedding].shape
            or not same_bytes(
                heads[head][tuple(slice(*extent) for extent in piece.source)],
                destination_of(self.served(piece.target)[0], piece),
            )
        ]
        if differ:
            raise ConfigError("\n".join(differ))

    def _require_served(self, heads: Iterable[str]) -> None:
        differ = [
            head
            for head in heads
            for piece in self.manifest.pieces[self.manifest.tied[head]]
            if not same_bytes(
                destination_of(self.stager.plain[piece.target], piece),
                destination_of(self.served(piece.target)[0], piece),
            )
        ]
        if differ:
            raise refusal(
                [
                    {
                        "kind": "tied-differs",
                        "tensor": head,
                        "detail": "differs from the embedding that is served, which serves as it: send both",
                    }
                    for head in differ
                ]
            )

    def commit(self) -> None:
        """Swap live and twin contents and rebuild what is derived from the live ones; all of it or nothing."""
        self.exchange.run()
        try:
            self._derive()
        except BaseException:
            if self.exchange.inplace:
                self.exchange.broken = True
                raise
            self.exchange.run()
            self.exchange.broken = True  # unless what was derived before can be derived again
            self._derive()
            self.exchange.broken = False
            raise

    def keep_constants(self) -> None:
        """Copy to host memory what no update brings: memory is about to lose its contents."""
        tensors = dict(reachable_tensors(self.live))
        paths = tensors.keys() - _exchanged(tensors, self._holders)
        constant = [path for path in paths if path.rpartition(".")[2] not in _NOT_LOADED]
        self._constants = {path: tensors[path].cpu().clone() for path in constant}

    def refresh(self) -> None:
        """Memory came back without its contents: put back what was kept, and make the rest anew."""
        tensors, others = dict(reachable_tensors(self.live)), dict(reachable_tensors(self.model))
        for path, kept in self._constants.items():
            tensors[path].copy_(kept)
            if path in others:
                others[path].copy_(kept)
        self._constants = {}
        self.exchange.restore()

    def _derive(self) -> None:
        for _, layer in self._served:
            layer.quant_method.derive(layer)

    def served(self, target: str) -> tuple[Tensor, Tensor | None]:
        """Live values of a parameter or buffer, and its scales when it is quantized."""
        part = self._parts.get(target)
        if part is not None:
            return part.codes, part.scales
        return tensor_at(self.live, target).data, None

    def addresses(self) -> dict[str, int]:
        """Storage address of every exchanged live tensor, by path."""
        tensors = dict(reachable_tensors(self.live))
        return {path: tensors[path].data_ptr() for path in sorted(_exchanged(tensors, self._holders))}


def _trace(
    twin: nn.Module, layers: Mapping[str, nn.Module], specs: list[TensorSpec], rank: int, names: ModelNames
) -> Manifest:
    """This rank's manifest, as its loader's copies tell it."""
    parts = [(path, part) for path, layer in layers.items() for part in layer.quant_method.matrices(layer)]
    quantized = {f"{path}.{part.name}": part.values for path, part in parts}
    held = {f"{path}.{part.parameter}" for path, part in parts}
    loadable = loadable_tensors(twin, _NOT_LOADED)
    plain = {path: tensor for path, tensor in loadable.items() if path not in held}

    def traced(specs: Iterable[TensorSpec]) -> dict[str, tuple[ShardSlice, ...]]:
        paths = frozenset(quantized)
        found = load_trace(twin.load_weights, quantized | plain, specs, quantized=paths, rank=rank)
        _require_same_storages(loadable, loadable_tensors(twin, _NOT_LOADED))
        return found

    pieces = traced(specs)
    tied = names.tied(
        {name: [loadable.get(piece.target) for piece in parts] for name, parts in pieces.items()}, loadable
    )
    last = {
        (piece.target, piece.origin): name
        for name, parts in pieces.items()
        if name not in tied
        for piece in parts
    }
    used = {
        name: parts
        for name, parts in pieces.items()
        if name not in tied and any(last[piece.target, piece.origin] == name for piece in parts)
    }
    tensors = {spec.name: spec for spec in specs if spec.name in used}
    ignored = frozenset(spec.name for spec in specs) - used.keys() - tied.keys()
    scale_formats = {layer.quant_method.scale_format for layer in layers.values()} or {"fp32"}
    (scale_format,) = scale_formats
    plainly = Manifest(tensors, ignored, used, scale_format, 1, tied)
    return replace(plainly, aliases=aliases_of(names.aliases(plainly, specs), plainly, traced))


def _quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), BlockFp8LinearMethod | BlockFp8ExpertsMethod):
            yield path, module


def _require_same_storages(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` naming each tensor in whose place a loader put another one: no copy tells of it."""
    storages = {path: identity_of(tensor) for path, tensor in before.items()}
    replaced = [path for path, tensor in after.items() if identity_of(tensor) != storages.get(path)]
    _refuse([f"{path}: the model's loader puts another tensor in its place" for path in replaced])


def _refuse(problems: list[str]) -> None:
    if problems:
        raise no_live_updates(problems)


def _targets(pieces: Mapping[str, tuple[ShardSlice, ...]]) -> frozenset[str]:
    return frozenset(piece.target for parts in pieces.values() for piece in parts)


def _pairs(
    live: nn.Module, twin: nn.Module, held: frozenset[str], inplace: bool
) -> tuple[list[frozenset[str]], list[tuple[Tensor, Tensor]]]:
    """Classify everything; returns each exchanged storage once, as the paths of its tensors and as live and twin.

    Raises:
        ConfigError: naming every tensor that could be forgotten by an exchange.
    """
    tensors, others = dict(reachable_tensors(live)), dict(reachable_tensors(twin))
    exchanged = _exchanged(tensors, held)
    problems = [
        f"{path}: only in {'live' if path in tensors else 'twin'}"
        for path in sorted(
            path for path in tensors.keys() ^ others.keys() if path.rpartition(".")[2] not in _NOT_LOADED
        )
    ]
    for path in sorted(tensors.keys() & others.keys()):
        here, there = tensors[path], others[path]
        if path in exchanged:
            if here.shape != there.shape or here.dtype != there.dtype or here.stride() != there.stride():
                problems.append(
                    f"{path}: laid out differently in live {_layout(here)} and twin {_layout(there)}"
                )
            elif not here.is_contiguous():
                problems.append(f"{path}: expected contiguous elements, found {_layout(here)}")
            elif not inplace and storage_of(here) == storage_of(there):
                problems.append(f"{path}: loaded from the checkpoint, though live and twin share it")
        elif path.rpartition(".")[2] not in _NOT_LOADED and not _same(here, there):
            problems.append(f"{path}: neither loaded from the checkpoint nor equal in live and twin")
    unknown = held - tensors.keys()
    problems += [f"{path}: a target of the checkpoint that live does not have" for path in sorted(unknown)]
    groups, other_groups = _aliases(tensors, exchanged), _aliases(others, exchanged)
    if not problems and set(groups.values()) != set(other_groups.values()):
        problems.append("live and twin share storages in different ways")
    _refuse(problems)
    paths = list(groups.values())
    pairs = []
    for group in paths:
        whole = max(sorted(group), key=lambda path: tensors[path].nbytes)
        problems += [
            f"{path}: expected a part of {whole}, whose storage it shares"
            for path in sorted(group)
            if not lies_in(tensors[path], tensors[whole])
        ]
        pairs.append((tensors[whole], others[whole]))
    _refuse(problems)
    return paths, pairs


def _exchanged(tensors: Mapping[str, Tensor], held: frozenset[str]) -> set[str]:
    """Paths of all tensors that share a storage with one of these."""
    storages = {storage_of(tensors[path]) for path in held & tensors.keys()}
    return {path for path, tensor in tensors.items() if storage_of(tensor) in storages}


def _aliases(tensors: Mapping[str, Tensor], exchanged: set[str]) -> dict[int, frozenset[str]]:
    groups: dict[int, set[str]] = defaultdict(set)
    for path in exchanged:
        if path in tensors:
            groups[storage_of(tensors[path])].add(path)
    return {storage: frozenset(paths) for storage, paths in groups.items()}


def _drop_kv_placeholders(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "kv_cache_dtype"):
            for name in _KV_PARAMETERS & module._parameters.keys():
                delattr(module, name)


def _same(here: Tensor, there: Tensor) -> bool:
    if here.shape != there.shape or here.dtype != there.dtype:
        return False
    if storage_of(here) == storage_of(there):
        return True
    flat = here.reshape(-1), there.reshape(-1).to(here.device)  # a scalar has no bytes to view
    return torch.equal(*(part.view(torch.uint8) for part in flat))


def _layout(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} strides {list(tensor.stride())}"
