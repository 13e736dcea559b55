# SPDX-License-Identifier: Apache-2.0
"""Makes a second module tree of the served model, and records what a checkpoint brought.

Calls `initialize_model` a second time with a configuration whose forward context is empty. On both trees, projections and
embeddings that models make without asking any quantization (routers, gates of shared experts, the embedding that is the head
too) get a method that leaves their weights readable: on the CPU vLLM packs them away.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_fp8ext.compat.unsupported_options import not_updatable
from vllm_fp8ext.compat.update.mamba_decay import keep_logarithms
from vllm_fp8ext.compat.update.shadow_routing import route_alone
from vllm_fp8ext.compat.wrapping import wrapped
from vllm_fp8ext.layers.linear import KeptEmbeddingMethod, KeptLinearMethod
from vllm_fp8ext.layers.lm_head import is_tied
from vllm_fp8ext.update.contract.manifest import TensorSpec

FEATURE: str = "core"
WHY: str = "Build the shadow, and learn which tensors an update must bring: vLLM tells neither."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights(model_config, model)",
    "vllm.model_executor.model_loader.dummy_loader:DummyModelLoader.load_weights(model, model_config)",
)
USES: dict[str, tuple[str, ...]] = {
    "build the shadow": (
        "vllm.model_executor.model_loader.utils:initialize_model(vllm_config, model_config)",
    ),
    "build the shadow without compiling it": ("vllm.config:CompilationMode",),
    "keep the shadow's layers out of the live forward context": (
        "vllm.config.compilation:CompilationConfig.static_forward_context",
    ),
    "keep the experts of a second model out of the served one": (
        "vllm.config.compilation:CompilationConfig.static_all_moe_layers",
    ),
    "keep layers in the checkpoint's precision": (
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = (
    "vLLM tells the names, shapes and dtypes that a model was loaded from, builds a "
    "second model beside the served one, and keeps unquantized weights readable on "
    "the CPU"
)


_QUANTIZATION_SCALE = re.compile(
    r"weight_scale_inv$|(weight|input|output|activation|\b(q|k|v|kv|prob))_scale$"
)
"""Names of scales that belong to codes, or to K and V. A model may have others, which are weights."""


DRAFT = "draft"
"""vLLM's runner type of a model that drafts."""


@dataclass
class Recorded:
    """Tensors that a checkpoint brought, in order.

    `heads`: output layers, in host memory, of a model that has none of its own: its loader drops them.
    """

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    heads: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def recorded_checkpoint() -> Iterator[Recorded]:
    """Note every tensor that the default loader reads while entered, in order.

    The model that it reads them for keeps what it does not quantize readable.
    """
    recorded = Recorded()

    def wrap_get_all_weights(original: Any) -> Any:
        def get_all_weights(self: Any, of: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
            if of.runner_type == DRAFT:  # keeps its weights
                yield from original(self, of, model)
                return
            _keep_readable(model)
            keep_logarithms(model, shadow=False)
            has_head = any(isinstance(module, ParallelLMHead) for module in model.modules())
            drops_head = not has_head and (is_tied(of) or get_pp_group().is_last_rank)
            for name, tensor in original(self, of, model):
                if name.endswith("lm_head.weight") and drops_head:
                    recorded.heads[name] = tensor.cpu()
                dtype = str(tensor.dtype).removeprefix("torch.")
                recorded.specs[name] = TensorSpec(name, tuple(tensor.shape), dtype)
                yield name, tensor

        return get_all_weights

    def wrap_load_weights(original: Any) -> Any:
        def load_weights(self: Any, model: nn.Module, model_config: Any) -> None:
            _keep_readable(model)
            original(self, model, model_config)

        return load_weights

    with (
        wrapped(DefaultModelLoader, "get_all_weights", wrap_get_all_weights),
        wrapped(DummyModelLoader, "load_weights", wrap_load_weights),
    ):
        yield recorded


def initialize_shadow(config: VllmConfig, device: torch.device) -> nn.Module:
    """Make a second instance of the served model that nothing finds by name."""
    shadow = copy.copy(config)
    shadow.quant_config = copy.copy(config.quant_config)
    shadow.quant_config.shadow = True
    shadow.compilation_config = copy.copy(config.compilation_config)
    shadow.compilation_config.static_forward_context = {}
    shadow.compilation_config.static_all_moe_layers = []
    shadow.compilation_config.mode = CompilationMode.NONE
    shadow.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    shadow.compilation_config.custom_ops = ["all"]
    with set_default_torch_dtype(config.model_config.dtype), device:
        model = initialize_model(vllm_config=shadow, model_config=shadow.model_config).eval()
    _keep_readable(model)
    keep_logarithms(model, shadow=True)
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), KeptLinearMethod | KeptEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)
    route_alone(model)
    return model


def _keep_readable(model: nn.Module) -> None:
    kept = {UnquantizedLinearMethod: KeptLinearMethod, UnquantizedEmbeddingMethod: KeptEmbeddingMethod}
    for module in model.modules():
        method = kept.get(type(getattr(module, "quant_method", None)))
        if method is not None:
            module.quant_method = method()


def kept_layers(models: nn.Module) -> dict[str, list[str]]:
    """Name the projections that stay in 16 bits unasked, by the reason."""
    kept: dict[str, list[str]] = defaultdict(list)
    for module in models.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, KeptLinearMethod) and method.reason:
            kept[method.reason].append(module.prefix)
    return kept


def require_no_copies(model: nn.Module) -> None:
    """Raises `ConfigError` naming modules that copy weights at their first step: no update would reach the copies."""
    copying = {
        "FourierRotaryEmbedding (a table made of its coefficients)": any(
            type(module).__name__ == "FourierRotaryEmbedding" for module in model.modules()
        ),
        "MoERunner with a router and a gate in one (a copy of both)": any(
            getattr(module, "_fse_fuse_gate", False) for module in model.modules()
        ),
    }
    copies = [name for name, there in copying.items() if there]
    if copies:
        raise not_updatable(copies, "would not reach all of them")


def checkpoint_specs(recorded: dict[str, TensorSpec], dtype: torch.dtype) -> list[TensorSpec]:
    """List what an update of a model loaded from these tensors brings: values, never scales."""
    served = str(dtype).removeprefix("torch.")
    specs = []
    for spec in recorded.values():
        if _QUANTIZATION_SCALE.search(spec.name):
            continue
        dtype_name = served if spec.dtype.startswith("float8") else spec.dtype
        specs.append(TensorSpec(spec.name, spec.shape, dtype_name))
    return specs
