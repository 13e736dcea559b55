# SPDX-License-Identifier: Apache-2.0
"""Closes the ways by which others load weights into a served model.

They would write values of 16 bits into codes, or scales of 1.0 for the KV cache, and serving would go on. The served
module tree gets loaders that refuse. Functions of vLLM that take a model or a parameter refuse those of a served model,
and go on for others.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from torch import nn

from vllm_fp8ext.errors import ForeignLoadError
from vllm_fp8ext.update.worker.reachable_tensors import loadable_tensors

FEATURE: str = "core"
WHY: str = "Close other ways to load weights: they would write 16 bits into codes, and serving would go on."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.model_loader.utils:process_weights_after_loading(model)",
    "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload(model)",
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing(model)",
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
    "vllm.model_executor.model_loader.reload.inplace:get_parameter_for_reload(model)",
    "vllm.model_executor.model_loader.weight_utils:default_weight_loader(param)",
    "vllm.v1.worker.gpu_worker:Worker.reload_weights",
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
    ("vllm.model_executor.model_loader.reload.inplace", "get_parameter_for_reload"),
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
    "reload_weights",
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
)
"""Methods of vLLM's workers: some write to parameters themselves, some wait for a trainer first."""

_served: WeakSet[nn.Module] = WeakSet()
"""Modules of served models."""


def close(worker: Any, model: nn.Module) -> None:
    """Refuse from now on whatever would load weights into this model of a worker's. Idempotent."""
    for name in _WORKER_METHODS:
        if callable(getattr(worker, name, None)):
            setattr(worker, name, _refusing(name))
    for module in model.modules():
        _served.add(module)
        for name in _METHODS:
            if callable(getattr(module, name, None)):
                setattr(module, name, _refusing(f"{type(module).__name__}.{name}"))
    for tensor in loadable_tensors(model, ()).values():
        tensor.weight_loader = _refusing("weight_loader")
    for module_name, name in _FUNCTIONS:
        _guard(module_name, name)


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ForeignLoadError(what)

    refuse.refuses = True  # type: ignore[attr-defined]
    return refuse


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
    def guarded(target: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_served(target):
            raise ForeignLoadError(name)
        return original(target, *args, **kwargs)

    guarded.guards = original  # type: ignore[attr-defined]
    for holder in _holders(name, original):
        holder[name] = guarded


def _holders(name: str, value: Any) -> Iterator[dict[str, Any]]:
    for module in list(sys.modules.values()):
        content = getattr(module, "__dict__", None)
        if isinstance(content, dict) and content.get(name) is value:
            yield content
