# SPDX-License-Identifier: Apache-2.0
"""The second copy of a rank's weights: what may differ between live and twin, and what is exchanged. In place, it is a second
module tree over the same memory.

Every tensor reachable from the two module trees is classified at start: *exchanged* (it holds checkpoint weights), *shared*
(one storage serves both), *constant* (equal in both, never loaded), *derived* (rebuilt from exchanged ones), or KV-cache
state. Anything else refuses the start: an update that forgets a tensor would serve a mixture.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm_fp8ext.errors import no_live_updates
from vllm_fp8ext.experts import DEQUANTIZED, BlockFp8ExpertsMethod
from vllm_fp8ext.linear import BlockFp8LinearMethod
from vllm_fp8ext.weights.exchange import Exchange
from vllm_fp8ext.weights.manifest import Manifest, Piece, TensorSpec
from vllm_fp8ext.weights.parts import holders, served_parts
from vllm_fp8ext.weights.plan import trace
from vllm_fp8ext.weights.staging import QuantizedTarget, Stager

_KV_STATE = frozenset(
    f"_{name}_scale{suffix}" for name in ("q", "k", "v", "prob") for suffix in ("", "_cpu", "_float")
) | {"kv_cache"}
"""Tensors of an attention layer that belong to its KV cache, not to the weights."""
_KV_PARAMETERS = frozenset(f"{name}_scale" for name in ("q", "k", "v", "prob"))
"""Placeholders of an attention layer into which a checkpoint's scales are loaded; the live model has consumed them."""
_DERIVED = frozenset({"dequantized", *DEQUANTIZED})


class Twin:
    """The twin of one rank, ready to be staged into and exchanged."""

    def __init__(
        self,
        live: nn.Module,
        twin: nn.Module,
        specs: Iterable[TensorSpec],
        rank: int,
        tied: bool,
        *,
        inplace: bool = False,
    ) -> None:
        self.live = live
        self.model = twin
        _drop_kv_placeholders(twin)
        layers = dict(_quantized_layers(twin))
        pieces, ignored, tensors = _trace(twin, layers, list(specs), rank, tied)
        quantized: dict[str, QuantizedTarget] = {}
        formats = {layer.quant_method.scale_format for layer in layers.values()} or {"fp32"}
        (self.scale_format,) = formats
        device = next(live.parameters()).device
        for path, layer in layers.items():
            dtypes = {part.name: part.values.dtype for part in layer.quant_method.parts(layer)}
            if inplace:
                layer.quant_method.adopt_from(layer, live.get_submodule(path))
            else:
                layer.quant_method.allocate(layer, device)
            for part in layer.quant_method.parts(layer):
                assert part.scales is not None
                quantized[f"{path}.{part.name}"] = QuantizedTarget(
                    part.values, part.scales, dtypes[part.name], self.scale_format
                )
        self._served = list(_quantized_layers(live))  # to look for them takes milliseconds
        self._parts = served_parts(self._served)
        holding = holders(self._parts, self._parts)
        own = {path: tensor for path, tensor in _parameters(twin).items() if path not in holding}
        if inplace:
            for path, parameter in own.items():
                parameter.data = live.get_parameter(path).data
        self.stager = Stager(pieces, quantized, {path: tensor.data for path, tensor in own.items()})
        self._holders = holders(_targets(pieces), self._parts)
        groups, pairs = _pairs(live, twin, self._holders)
        self._groups = groups
        self._constants: dict[str, Tensor] = {}
        self.exchange = Exchange(pairs, inplace=inplace)
        self.manifest = Manifest(tensors, frozenset(ignored), pieces, self.scale_format, 1)

    def keep_others(self, names: Iterable[str]) -> None:
        """Copy from live what holds nothing of these checkpoint tensors. On any thread, while nothing is exchanged."""
        if self.exchange.inplace:
            return
        targets = {piece.target for name in names for piece in self.stager.pieces.get(name, ())}
        touched = holders(targets, self._parts)
        for paths, (live, twin) in zip(self._groups, self.exchange.pairs, strict=True):
            if not paths & touched:
                twin.copy_(live)
        for target, part in self._parts.items():
            if target not in targets and touched.intersection(part.paths):  # beside other experts
                staged = self.stager.quantized[target]
                staged.codes.copy_(part.codes)
                staged.scales.copy_(part.scales)

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
        tensors = dict(_reachable(self.live))
        paths = tensors.keys() - _exchanged(tensors, self._holders)
        constant = [path for path in paths if path.rpartition(".")[2] not in _KV_STATE | _DERIVED]
        self._constants = {path: tensors[path].cpu().clone() for path in constant}

    def refresh(self) -> None:
        """Memory came back without its contents: put back what was kept, and make the rest anew."""
        tensors, others = dict(_reachable(self.live)), dict(_reachable(self.model))
        for path, kept in self._constants.items():
            tensors[path].copy_(kept)
            if path in others:
                others[path].copy_(kept)
        self._constants = {}
        self.exchange.refresh()

    def _derive(self) -> None:
        for _, layer in self._served:
            layer.quant_method.derive(layer)

    def served(self, target: str) -> tuple[Tensor, Tensor | None]:
        """Live values of a parameter, and its scales when it is quantized."""
        part = self._parts.get(target)
        if part is not None:
            return part.codes, part.scales
        return self.live.get_parameter(target).data, None

    def addresses(self) -> dict[str, int]:
        """Storage address of every exchanged live tensor, by path."""
        tensors = dict(_reachable(self.live))
        return {path: tensors[path].data_ptr() for path in sorted(_exchanged(tensors, self._holders))}


def _trace(
    twin: nn.Module, layers: Mapping[str, nn.Module], specs: list[TensorSpec], rank: int, tied: bool
) -> tuple[dict[str, tuple[Piece, ...]], set[str], dict[str, TensorSpec]]:
    """Pieces by name, ignored names and required tensors."""
    parts = [(path, part) for path, layer in layers.items() for part in layer.quant_method.parts(layer)]
    quantized = {f"{path}.{part.name}": part.values for path, part in parts}
    held = {f"{path}.{part.parameter}" for path, part in parts}
    plain = {path: tensor for path, tensor in _parameters(twin).items() if path not in held}
    paths = frozenset(quantized)
    pieces = trace(twin.load_weights, quantized | plain, specs, quantized=paths, rank=rank)
    last = {(piece.target, piece.origin): name for name, parts in pieces.items() for piece in parts}
    used = {
        name: parts
        for name, parts in pieces.items()
        if any(last[piece.target, piece.origin] == name for piece in parts)
    }
    ignored = {spec.name for spec in specs} - used.keys()
    if tied:
        ignored.add("lm_head.weight")
    return used, ignored - used.keys(), {spec.name: spec for spec in specs if spec.name in used}


def _quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), BlockFp8LinearMethod | BlockFp8ExpertsMethod):
            yield path, module


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def _targets(pieces: Mapping[str, tuple[Piece, ...]]) -> frozenset[str]:
    return frozenset(piece.target for parts in pieces.values() for piece in parts)


def _pairs(
    live: nn.Module, twin: nn.Module, held: frozenset[str]
) -> tuple[list[frozenset[str]], list[tuple[Tensor, Tensor]]]:
    """Classify everything; returns each exchanged storage once, as the paths of its tensors and as live and twin.

    Raises:
        ConfigError: naming every tensor that could be forgotten by an exchange.
    """
    tensors, others = dict(_reachable(live)), dict(_reachable(twin))
    exchanged = _exchanged(tensors, held)
    problems = [
        f"{path}: only in {'live' if path in tensors else 'twin'}"
        for path in sorted(
            path
            for path in tensors.keys() ^ others.keys()
            if path.rpartition(".")[2] not in _KV_STATE | _DERIVED
        )
    ]
    for path in sorted(tensors.keys() & others.keys()):
        here, there = tensors[path], others[path]
        if path in exchanged:
            if here.shape != there.shape or here.dtype != there.dtype or here.stride() != there.stride():
                problems.append(
                    f"{path}: laid out differently in live {_layout(here)} and twin {_layout(there)}"
                )
        elif path.rpartition(".")[2] not in _KV_STATE | _DERIVED and not _same(here, there):
            problems.append(f"{path}: neither loaded from the checkpoint nor equal in live and twin")
    unknown = held - tensors.keys()
    problems += [f"{path}: a target of the checkpoint that live does not have" for path in sorted(unknown)]
    groups, other_groups = _aliases(tensors, exchanged), _aliases(others, exchanged)
    if not problems and set(groups.values()) != set(other_groups.values()):
        problems.append("live and twin share storages in different ways")
    if problems:
        raise no_live_updates(problems)
    paths = list(groups.values())
    return paths, [(tensors[min(group)], others[min(group)]) for group in paths]


def _exchanged(tensors: Mapping[str, Tensor], held: frozenset[str]) -> set[str]:
    """Paths of all tensors that share a storage with one of these."""
    storages = {tensors[path].untyped_storage().data_ptr() for path in held & tensors.keys()}
    return {path for path, tensor in tensors.items() if tensor.untyped_storage().data_ptr() in storages}


def _aliases(tensors: Mapping[str, Tensor], exchanged: set[str]) -> dict[int, frozenset[str]]:
    groups: dict[int, set[str]] = defaultdict(set)
    for path in exchanged:
        if path in tensors:
            groups[tensors[path].untyped_storage().data_ptr()].add(path)
    return {storage: frozenset(paths) for storage, paths in groups.items()}


def _reachable(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every non-empty tensor of a module tree: parameters, buffers, attributes, and attributes of plain objects."""
    for path, module in model.named_modules(remove_duplicate=False):
        named = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in named.items():
            if not name.startswith(("_parameters", "_buffers", "_modules")):
                for suffix, tensor in _tensors_in(value, depth=2):
                    yield f"{path}.{name}{suffix}".lstrip("."), tensor


def _tensors_in(value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.numel():
            yield "", value
    elif depth == 0 or isinstance(value, nn.Module | type):
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from ((f"[{key}]{rest}", tensor) for rest, tensor in _tensors_in(item, depth - 1))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from ((f"[{index}]{rest}", tensor) for rest, tensor in _tensors_in(item, depth - 1))
    elif type(value).__module__.startswith("vllm") and hasattr(value, "__dict__"):
        for key, item in vars(value).items():
            yield from ((f".{key}{rest}", tensor) for rest, tensor in _tensors_in(item, depth - 1))


def _drop_kv_placeholders(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "kv_cache_dtype"):
            for name in _KV_PARAMETERS & module._parameters.keys():
                delattr(module, name)


def _same(here: Tensor, there: Tensor) -> bool:
    if here.shape != there.shape or here.dtype != there.dtype:
        return False
    if here.untyped_storage().data_ptr() == there.untyped_storage().data_ptr():
        return True
    flat = here.reshape(-1), there.reshape(-1).to(here.device)  # a scalar has no bytes to view
    return torch.equal(*(part.view(torch.uint8) for part in flat))


def _layout(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} strides {list(tensor.stride())}"
