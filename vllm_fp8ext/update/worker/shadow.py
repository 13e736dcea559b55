# SPDX-License-Identifier: Apache-2.0
"""The shadow: the second copy of a rank's weights, in a module tree of its own.

With `inplace` that tree lies over the memory of the live model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.layers.block_matrix import served_matrices, tensor_paths
from vllm_fp8ext.layers.experts import BlockFp8ExpertsMethod
from vllm_fp8ext.layers.linear import BlockFp8LinearMethod
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.update_errors import refusal
from vllm_fp8ext.update.worker.alias_names import ModelNames
from vllm_fp8ext.update.worker.derived_tensors import derived_paths, derived_tensors
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.rank_manifest import rank_manifest
from vllm_fp8ext.update.worker.reachable_tensors import (
    loadable_tensors,
    parameters_of,
    reachable_tensors,
    tensor_at,
)
from vllm_fp8ext.update.worker.same_bytes import same_bytes
from vllm_fp8ext.update.worker.stager import Stager
from vllm_fp8ext.update.worker.staging_steps import destination_of
from vllm_fp8ext.update.worker.tensor_classes import NOT_LOADED, is_loaded, swap_pairs, swapped_paths
from vllm_fp8ext.update.worker.weight_swap import WeightSwap

_KV_PARAMETERS = frozenset(f"{name}_scale" for name in ("q", "k", "v", "prob"))
"""Placeholders of an attention layer into which a checkpoint's scales are loaded; the live model has consumed them."""


class Shadow:
    """The shadow of one rank: it is staged into, and swapped with the live weights."""

    def __init__(
        self,
        live: nn.Module,
        shadow: nn.Module,
        specs: Iterable[TensorSpec],
        rank: int,
        names: ModelNames | None = None,
        *,
        inplace: bool = False,
        beside: Sequence[nn.Module] = (),
    ) -> None:
        """`beside`: modules with weights that no update brings: a draft model, layers with adapters."""
        self.live = live
        self._beside = nn.ModuleList(beside)
        self.model = shadow
        _drop_kv_placeholders(shadow)
        layers = dict(_quantized_layers(shadow))
        self.manifest = rank_manifest(shadow, layers, list(specs), rank, names or ModelNames())
        self.scale_format = cast("ScaleFormat", self.manifest.scale_format)
        quantized = dict(self._allocated(layers, inplace))
        self._served_layers = list(_quantized_layers(live))  # to look for them takes milliseconds
        self._derived = [derived for _, derived in derived_tensors(live)]
        self._matrices = served_matrices(self._served_layers)
        pieces = self.manifest.pieces
        targets = frozenset(piece.target for parts in pieces.values() for piece in parts)
        plain = self._plain_tensors(targets)
        if inplace:
            for path, tensor in plain.items():
                tensor.data = tensor_at(live, path).data
        values = {path: tensor.data for path, tensor in plain.items()}
        stacked = {name: self.manifest.tensors[name].shape for name in self.manifest.stacked}
        self.stager = Stager(pieces, quantized, values, self.manifest.tied, stacked)
        self._weight_paths = tensor_paths(targets, self._matrices)
        self._groups, pairs = swap_pairs(live, shadow, self._weight_paths, inplace)
        self._constants: dict[str, Tensor] = {}
        self._kept: list[tuple[Tensor, Tensor]] = []
        """Tensors beside the live model, and their values in host memory."""
        self.weight_swap = WeightSwap(pairs, inplace=inplace)

    def _allocated(
        self, layers: Mapping[str, nn.Module], inplace: bool
    ) -> Iterator[tuple[str, QuantizedTarget]]:
        """Give quantized layers memory for codes and scales, or with `inplace` the live one; yield the targets in it."""
        device = next(self.live.parameters()).device
        for path, layer in layers.items():
            method: Any = layer.quant_method
            dtypes = {matrix.name: matrix.values.dtype for matrix in method.matrices(layer)}
            if inplace:
                method.adopt_from(layer, self.live.get_submodule(path))
            else:
                method.allocate(layer, device)
            for matrix in method.matrices(layer):
                target = QuantizedTarget(matrix.values, matrix.scales, dtypes[matrix.name], self.scale_format)
                yield f"{path}.{matrix.name}", target

    def _plain_tensors(self, targets: frozenset[str]) -> dict[str, Tensor]:
        """List the shadow's parameters and loaded buffers that are not quantized, by path."""
        quantized, parameters = tensor_paths(self._matrices, self._matrices), parameters_of(self.model)
        derived = derived_paths(self.model)
        return {
            path: tensor
            for path, tensor in loadable_tensors(self.model, NOT_LOADED).items()
            if path not in quantized | derived and (path in targets or path in parameters)
        }

    def copy_served(self) -> None:
        """Copy all that is served: an update changes some of it. On any thread, but not during a swap."""
        if not self.weight_swap.inplace:
            for live, shadow in self.weight_swap.pairs:
                shadow.copy_(live)

    def copy_unsent(self, names: Iterable[str]) -> None:
        """Copy from live what no tensor of these writes. On any thread, but not during a swap.

        Raises:
            UpdateError: `tied-differs`: an output layer came without the embedding that is served as it, and is not equal.
        """
        if self.weight_swap.inplace:
            return
        names = set(names)
        self._require_served(
            head for head, embedding in self.manifest.tied.items() if head in names and embedding not in names
        )
        targets = {piece.target for name in names for piece in self.stager.pieces.get(name, ())}
        written = tensor_paths(targets, self._matrices)
        for paths, (live, shadow) in zip(self._groups, self.weight_swap.pairs, strict=True):
            if not paths & written:
                shadow.copy_(live)
        for target, matrix in self._matrices.items():
            if target not in targets and written.intersection(matrix.paths):  # beside other experts
                staged = self.stager.quantized[target]
                staged.codes.copy_(matrix.codes)
                staged.scales.copy_(matrix.scales)

    def require_equal(self, heads: Mapping[str, Tensor]) -> None:
        """Require that output layers of the checkpoint equal the embedding that is served as them.

        `heads`: by name, on any device.

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
        """Require that staged output layers equal the embedding that is served."""
        detail = "differs from the embedding that is served, which serves as it: send both"
        problems = [
            {"kind": "tied-differs", "tensor": head, "detail": detail}
            for head in heads
            for piece in self.manifest.pieces[self.manifest.tied[head]]
            if not same_bytes(
                destination_of(self.stager.plain[piece.target], piece),
                destination_of(self.served(piece.target)[0], piece),
            )
        ]
        if problems:
            raise refusal(problems)

    def swap(self) -> None:
        """Swap live and shadow contents and rebuild what is derived from the live ones; all of it or nothing."""
        self.weight_swap.run()
        try:
            self._derive()
        except BaseException:
            if self.weight_swap.inplace:
                self.weight_swap.broken = True
                raise
            self.weight_swap.run()
            self.weight_swap.broken = True  # unless what was derived before can be derived again
            self._derive()
            self.weight_swap.broken = False
            raise

    def save_constants(self) -> None:
        """Copy to host memory what no update brings: memory is about to lose its contents."""
        tensors = dict(reachable_tensors(self.live))
        paths = tensors.keys() - swapped_paths(tensors, self._weight_paths)
        self._constants = {path: tensors[path].cpu().clone() for path in paths if is_loaded(path)}
        own = {tensor.data_ptr() for tensor in tensors.values()}
        self._kept = [
            (tensor, tensor.cpu().clone())
            for path, tensor in reachable_tensors(self._beside)
            if is_loaded(path) and tensor.data_ptr() not in own
        ]

    def restore(self) -> None:
        """Put constants back into memory that lost its contents, and zero the weights."""
        tensors, others = dict(reachable_tensors(self.live)), dict(reachable_tensors(self.model))
        for path, constant in self._constants.items():
            tensors[path].copy_(constant)
            if path in others:
                others[path].copy_(constant)
        for tensor, values in self._kept:
            tensor.copy_(values)
        self._constants, self._kept = {}, []
        self.weight_swap.restore()

    def _derive(self) -> None:
        for _, layer in self._served_layers:
            layer.quant_method.derive(layer)
        for derived in self._derived:
            derived.rebuild()

    def derive(self) -> None:
        """Rebuild in place what the shadow's own forward reads beside its weights."""
        for _, derived in derived_tensors(self.model):
            derived.rebuild()

    def served(self, target: str) -> tuple[Tensor, Tensor | None]:
        """Return live values of a parameter or buffer, and its scales when it is quantized."""
        matrix = self._matrices.get(target)
        if matrix is not None:
            return matrix.codes, matrix.scales
        return tensor_at(self.live, target).data, None

    def addresses(self) -> dict[str, int]:
        """Return the storage address of every swapped live tensor, by path."""
        tensors = dict(reachable_tensors(self.live))
        paths = swapped_paths(tensors, self._weight_paths)
        return {path: tensors[path].data_ptr() for path in sorted(paths)}


def _quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), BlockFp8LinearMethod | BlockFp8ExpertsMethod):
            yield path, module


def _drop_kv_placeholders(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "kv_cache_dtype"):
            for name in _KV_PARAMETERS & module._parameters.keys():
                delattr(module, name)
