# SPDX-License-Identifier: Apache-2.0
"""Leads what others load into a served model to an update.

They would write values of 16 bits into codes, or scales of 1.0 for the KV cache, and serving would go on. The model's
`load_weights` stages tensors beside the served ones. Functions of vLLM that begin or end a reload of the model mark an
update. All other loaders of the served module tree refuse, and so do functions of vLLM that take a part of it. For others
they go on.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from vllm_fp8ext.errors import ForeignLoadError
from vllm_fp8ext.update.worker.loads import Loads
from vllm_fp8ext.update.worker.reachable_tensors import loadable_tensors

FEATURE: str = "core"
WHY: str = "Stage what others load: vLLM's loaders would write 16 bits into codes, and serving would go on."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.model_loader.utils:process_weights_after_loading(model)",
    "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload(model)",
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing(model)",
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
    "vllm.model_executor.model_loader.weight_utils:default_weight_loader(param)",
    "vllm.v1.worker.gpu_worker:Worker.reload_weights",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights(is_checkpoint_format)",
    "vllm.v1.worker.gpu_worker:Worker.init_weight_transfer_engine",
    "vllm.v1.worker.gpu_worker:Worker.start_weight_update",
    "vllm.v1.worker.gpu_worker:Worker.start_draft_weight_update",
    "vllm.v1.worker.gpu_worker:Worker.update_weights",
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM lets a quantization say that a model takes no weights"

_FUNCTIONS = (
    ("vllm.model_executor.model_loader.utils", "process_weights_after_loading"),
    ("vllm.model_executor.model_loader.reload.layerwise", "initialize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload.layerwise", "finalize_layerwise_processing"),
    ("vllm.model_executor.model_loader.reload.layerwise", "finalize_layerwise_reload"),
    ("vllm.model_executor.model_loader.weight_utils", "default_weight_loader"),
)
"""Functions whose first argument is a model, or a parameter of one."""
_METHODS = (
    "load_weights",
    "weight_loader",
    "weight_loader_v2",
    "load_state_dict",
    "process_weights_after_loading",
)
"""Methods of modules that write what they get, or make weights anew."""

_WORKER_METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
)
"""Methods of vLLM's workers: some write to parameters themselves, some wait for a trainer first."""

_BEGINS = ("initialize_layerwise_reload", "start_weight_update")
"""Functions and methods by which a caller begins an update of the whole model."""
_ENDS = (
    "process_weights_after_loading",
    "finalize_layerwise_processing",
    "finalize_layerwise_reload",
    "finish_weight_update",
)
"""Functions and methods by which a caller says that all has come."""

_served: WeakKeyDictionary[nn.Module, Loads | None] = WeakKeyDictionary()
"""Modules of served models; whole models with what takes their weights, if anything does."""


def close(worker: Any, model: nn.Module, loads: Loads | None) -> None:
    """Lead weights that somebody loads into a worker's model to `loads`, and refuse all else. Idempotent.

    `model`: holds the models that the worker runs. Without `loads` everything is refused.
    """
    for name in _WORKER_METHODS:
        if callable(getattr(worker, name, None)):
            setattr(worker, name, _marking(name, loads) or _refusing(name))
    for owner in (worker, worker.model_runner):
        if callable(getattr(owner, "reload_weights", None)):
            owner.reload_weights = _reloading(owner.reload_weights, loads)
    for module in model.modules():
        _served[module] = None
        for owner in (module, getattr(module, "quant_method", None)):
            for name in _METHODS:
                if callable(getattr(owner, name, None)):
                    setattr(owner, name, _refusing(f"{type(owner).__name__}.{name}"))
    for tensor in loadable_tensors(model, ()).values():
        tensor.weight_loader = _refusing("weight_loader")
    if loads is not None:
        for module in list(model.children())[:1]:  # a draft model keeps its weights
            _served[module] = loads
            module.load_weights = _staging(loads)
    for module_name, name in _FUNCTIONS:
        _guard(module_name, name)


def _staging(loads: Loads) -> Callable[..., set[str]]:
    def load_weights(weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> set[str]:
        return loads.load(weights)

    return load_weights


def _reloading(reload_weights: Callable[..., None], loads: Loads | None) -> Callable[..., None]:
    """Return vLLM's reload, which loads tensors of a checkpoint by the model; as they are served none may come."""

    def reload(
        weights_iterator: Any = None, weights_path: Any = None, is_checkpoint_format: bool = True
    ) -> None:
        if loads is None or not is_checkpoint_format:
            raise ForeignLoadError("reload_weights")
        reload_weights(weights_iterator=weights_iterator, weights_path=weights_path)

    return reload


def _marking(name: str, loads: Loads | None) -> Callable[..., None] | None:
    """Return what marks begin or end of an update in a function's place."""
    if loads is None or name not in (*_BEGINS, *_ENDS):
        return None
    tell = loads.begin if name in _BEGINS else loads.end

    def mark(*args: Any, **kwargs: Any) -> None:
        tell(name)

    return mark


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ForeignLoadError(what)

    refuse.refuses = True  # type: ignore[attr-defined]
    return refuse


def _unwrapped(target: Any) -> Any:
    """Return the model inside vLLM's wrappers of graphs.

    They are no modules, and pass every attribute on.
    """
    while not isinstance(target, nn.Module | Tensor) and hasattr(type(target), "unwrap"):
        target = target.unwrap()
    return target


def _is_served(target: Any) -> bool:
    """Tell whether this is a module of a served model, or one of its tensors."""
    if isinstance(target, nn.Module):
        return target in _served
    return getattr(getattr(target, "weight_loader", None), "refuses", False)


def _guard(module_name: str, name: str) -> None:
    """Put a guarded function in place of one, wherever it was imported by now."""
    original = getattr(importlib.import_module(module_name), name)
    if hasattr(original, "guards"):
        return

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        inner = _unwrapped(args[0] if args else kwargs.get("model", kwargs.get("param")))
        if not _is_served(inner):
            return original(*args, **kwargs)
        mark = _marking(name, _served.get(inner)) if isinstance(inner, nn.Module) else None
        if mark is None:
            raise ForeignLoadError(name)
        return mark()

    guarded.guards = original  # type: ignore[attr-defined]
    for holder in _holders(name, original):
        holder[name] = guarded


def _holders(name: str, value: Any) -> Iterator[dict[str, Any]]:
    for module in list(sys.modules.values()):
        content = getattr(module, "__dict__", None)
        if isinstance(content, dict) and content.get(name) is value:
            yield content
