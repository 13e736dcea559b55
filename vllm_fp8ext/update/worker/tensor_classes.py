# SPDX-License-Identifier: Apache-2.0
"""Classifies every tensor of live model and shadow at start.

A tensor is *swapped* (it holds checkpoint weights), *shared* (one storage serves both), *constant* (equal in both, never
loaded), *derived* (rebuilt from swapped ones), or KV-cache state. Anything else refuses the start: an update that forgets a
tensor would serve a mixture.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vllm_fp8ext.errors import no_live_updates
from vllm_fp8ext.layers.experts import DEQUANTIZED
from vllm_fp8ext.update.worker.derived_tensors import derived_paths
from vllm_fp8ext.update.worker.reachable_tensors import lies_in, reachable_tensors, storage_of

_KV_STATE = frozenset(
    f"_{name}_scale{suffix}" for name in ("q", "k", "v", "prob") for suffix in ("", "_cpu", "_float")
) | {"kv_cache"}
"""Tensors of an attention layer that belong to its KV cache, not to the weights."""
NOT_LOADED = _KV_STATE | frozenset({"dequantized", *DEQUANTIZED})
"""Tensors of modules that no loader writes: the KV cache's, and those that are derived from others."""


def is_loaded(path: str) -> bool:
    """Tell whether a loader may write the tensor at a path."""
    return path.rpartition(".")[2] not in NOT_LOADED


def swapped_paths(tensors: Mapping[str, Tensor], weight_paths: frozenset[str]) -> set[str]:
    """Return the paths of all tensors that share a storage with a weight."""
    storages = {storage_of(tensors[path]) for path in weight_paths & tensors.keys()}
    return {path for path, tensor in tensors.items() if storage_of(tensor) in storages}


def swap_pairs(
    live: nn.Module, shadow: nn.Module, weight_paths: frozenset[str], inplace: bool
) -> tuple[list[frozenset[str]], list[tuple[Tensor, Tensor]]]:
    """Classify every tensor; return each swapped storage once.

    `weight_paths`: tensors that hold checkpoint weights. Returns, for each storage, the paths of its tensors, and the largest
    of them in live and shadow.

    Raises:
        ConfigError: naming every tensor that a swap could forget.
    """
    derived = derived_paths(live) | derived_paths(shadow)
    tensors, others = (
        {path: tensor for path, tensor in reachable_tensors(model) if path not in derived}
        for model in (live, shadow)
    )
    swapped = swapped_paths(tensors, weight_paths)
    problems = [
        f"{path}: only in {'live' if path in tensors else 'shadow'}"
        for path in sorted(filter(is_loaded, tensors.keys() ^ others.keys()))
    ]
    for path in sorted(tensors.keys() & others.keys()):
        problem = _problem(path, tensors[path], others[path], path in swapped, inplace)
        problems += [f"{path}: {problem}"] if problem else []
    unknown = weight_paths - tensors.keys()
    problems += [f"{path}: a target of the checkpoint that live does not have" for path in sorted(unknown)]
    groups, other_groups = _by_storage(tensors, swapped), _by_storage(others, swapped)
    if not problems and set(groups.values()) != set(other_groups.values()):
        problems.append("live and shadow share storages in different ways")
    refuse(problems)
    paths, pairs = list(groups.values()), []
    for group in paths:
        whole = max(sorted(group), key=lambda path: tensors[path].nbytes)
        problems += [
            f"{path}: expected a part of {whole}, whose storage it shares"
            for path in sorted(group)
            if not lies_in(tensors[path], tensors[whole])
        ]
        pairs.append((tensors[whole], others[whole]))
    refuse(problems)
    return paths, pairs


def refuse(problems: list[str]) -> None:
    """Raise `ConfigError` if there are problems: live updates are not possible."""
    if problems:
        raise no_live_updates(problems)


def _problem(path: str, here: Tensor, there: Tensor, swapped: bool, inplace: bool) -> str | None:
    """Return why a tensor of live and shadow has no class, or None."""
    if not swapped:
        unclassified = is_loaded(path) and not _equal(here, there)
        return "neither loaded from the checkpoint nor equal in live and shadow" if unclassified else None
    if here.shape != there.shape or here.dtype != there.dtype or here.stride() != there.stride():
        return f"laid out differently in live {_layout(here)} and shadow {_layout(there)}"
    if not here.is_contiguous():
        return f"expected contiguous elements, found {_layout(here)}"
    if not inplace and storage_of(here) == storage_of(there):
        return "loaded from the checkpoint, though live and shadow share it"
    return None


def _by_storage(tensors: Mapping[str, Tensor], paths: set[str]) -> dict[int, frozenset[str]]:
    groups: dict[int, set[str]] = defaultdict(set)
    for path in paths:
        if path in tensors:
            groups[storage_of(tensors[path])].add(path)
    return {storage: frozenset(group) for storage, group in groups.items()}


def _equal(here: Tensor, there: Tensor) -> bool:
    if here.shape != there.shape or here.dtype != there.dtype:
        return False
    if storage_of(here) == storage_of(there):
        return True
    flat = here.reshape(-1), there.reshape(-1).to(here.device)  # a scalar has no bytes to view
    return torch.equal(*(part.view(torch.uint8) for part in flat))


def _layout(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} strides {list(tensor.stride())}"
