# SPDX-License-Identifier: Apache-2.0
"""Ways by which trainers load weights into a model of vLLM's, as a worker extension."""

from collections.abc import Callable
from typing import Any

import torch
from loading_worker import LoadingWorker


class ForeignLoaders(LoadingWorker):
    """For `worker_extension_cls`."""

    def tried(self, way: str) -> str | None:
        """What a way is refused with: the kind of error and its message; None where it was not."""
        try:
            ways[way](self)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def head_copies(self) -> list[bool]:
        """Tell of each output layer that is the embedding whether it multiplies by the embedding in FP8."""
        from vllm_fp8ext.kernels.numerics import reference
        from vllm_fp8ext.layers.lm_head import COPY, head_copies

        def same(layer: Any) -> bool:
            copy, (codes, scales) = getattr(layer, COPY), reference.quantize_weight(layer.weight.data)
            pairs = (
                (copy.weight.view(torch.uint8), codes.view(torch.uint8)),
                (copy.weight_scale_inv, scales),
            )
            values = reference.dequantize_weight(codes, scales)
            return all(torch.equal(*pair) for pair in (*pairs, (copy.dequantized, values)))

        return [same(layer) for layer, _ in head_copies(self.model_runner.get_model())]

    def write_by_loader(self, name: str) -> None:
        """Write by the loader of a parameter; raises in the worker."""
        parameter = self.model_runner.model.get_parameter(name)
        parameter.weight_loader(parameter, torch.ones(parameter.shape, dtype=torch.bfloat16))


def _weights(extension: ForeignLoaders) -> list[tuple[str, torch.Tensor]]:
    return [("model.norm.weight", torch.ones(256, dtype=torch.bfloat16))]


def _inner_reload(extension: ForeignLoaders) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(extension.model_runner.get_model().model)


def _inner_process(extension: ForeignLoaders) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    layers = extension.model_runner.get_model().model.layers
    process_weights_after_loading(layers, extension.model_config, torch.device("cpu"))


def _wrapped_process(extension: ForeignLoaders) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = extension.model_runner.get_model().model
    process_weights_after_loading(Wrapper(model), extension.model_config, torch.device("cpu"))


class Wrapper:
    """Passes on what is asked of a model, as vLLM's wrappers of CUDA graphs do."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def unwrap(self) -> Any:
        return self._model


def _method(extension: ForeignLoaders) -> None:
    layer = extension.model_runner.model.model.layers[0].self_attn.qkv_proj
    layer.quant_method.process_weights_after_loading(layer)


def _weight_loader(extension: ForeignLoaders) -> None:
    parameter = extension.model_runner.model.get_parameter("model.layers.0.self_attn.qkv_proj.weight")
    parameter.weight_loader(parameter, torch.ones(256, 256, dtype=torch.bfloat16), "q")


def _default_loader(extension: ForeignLoaders) -> None:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    parameter = extension.model_runner.model.get_parameter("model.norm.weight")
    default_weight_loader(parameter, torch.ones(256, dtype=torch.bfloat16))


def _auto_loader(extension: ForeignLoaders) -> None:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    AutoWeightsLoader(extension.model_runner.model).load_weights(_weights(extension))


def _layer_loader(extension: ForeignLoaders) -> None:
    layer = extension.model_runner.model.model.layers[0].self_attn.qkv_proj
    layer.weight_loader(layer.weight, torch.ones(256, 256, dtype=torch.bfloat16), "q")


def _state_dict(extension: ForeignLoaders) -> None:
    model = extension.model_runner.model
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})


def _attention(extension: ForeignLoaders) -> None:
    extension.model_runner.model.model.layers[0].self_attn.attn.process_weights_after_loading(torch.bfloat16)


ways: dict[str, Callable[[ForeignLoaders], Any]] = {
    "class load_weights": lambda e: type(e.model_runner.model).load_weights(
        e.model_runner.model, _weights(e)
    ),
    "inner load_weights": lambda e: e.model_runner.get_model().model.load_weights(_weights(e)),
    "AutoWeightsLoader": _auto_loader,
    "kernel format": lambda e: e.model_runner.reload_weights(
        weights_iterator=iter(_weights(e)), is_checkpoint_format=False
    ),
    "init_weight_transfer_engine": lambda e: e.init_weight_transfer_engine({}),  # type: ignore[attr-defined]
    "start_draft_weight_update": lambda e: e.start_draft_weight_update(),  # type: ignore[attr-defined]
    "update_weights": lambda e: e.update_weights({}),  # type: ignore[attr-defined]
    "initialize_layerwise_reload of a part": _inner_reload,
    "process_weights_after_loading of a part": _inner_process,
    "process_weights_after_loading of a wrapped part": _wrapped_process,
    "quant_method.process_weights_after_loading": _method,
    "param.weight_loader": _weight_loader,
    "layer.weight_loader": _layer_loader,
    "default_weight_loader": _default_loader,
    "load_state_dict": _state_dict,
    "attention.process_weights_after_loading": _attention,
}
