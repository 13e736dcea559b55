# SPDX-License-Identifier: Apache-2.0
"""A model is shown without the layers that add adapters, and shares everything else with what is shown."""

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA

from vllm_fp8ext.compat.update.lora_layers import without_adapters


class WithLora(BaseLayerWithLoRA):
    """A layer with room for an adapter, as vLLM makes it."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = torch.zeros(2, 2)


def model() -> tuple[nn.Module, nn.Linear]:
    """Two blocks, the first of which has a wrapped layer, and that layer."""
    inner = nn.Linear(2, 2)
    first = nn.ModuleDict({"norm": nn.LayerNorm(2), "proj": WithLora(inner)})
    second = nn.ModuleDict({"norm": nn.LayerNorm(2)})
    top = nn.Module()
    top.layers = nn.ModuleList([first, second])
    top.register_buffer("table", torch.ones(3))
    return top, inner


def test_layers_are_where_a_model_without_adapters_has_them() -> None:
    wrapped, inner = model()
    plain = without_adapters(wrapped)
    assert plain.get_submodule("layers.0.proj") is inner
    assert not any(isinstance(module, BaseLayerWithLoRA) for module in plain.modules())
    assert {name for name, _ in plain.named_parameters()} == {
        "layers.0.norm.weight",
        "layers.0.norm.bias",
        "layers.0.proj.weight",
        "layers.0.proj.bias",
        "layers.1.norm.weight",
        "layers.1.norm.bias",
    }


def test_what_holds_no_adapter_is_the_model_s_own_and_the_model_stays() -> None:
    wrapped, inner = model()
    plain = without_adapters(wrapped)
    assert plain.get_submodule("layers.1") is wrapped.get_submodule("layers.1")
    assert plain.get_submodule("layers.0.norm") is wrapped.get_submodule("layers.0.norm")
    assert plain.table is wrapped.table
    assert isinstance(wrapped.get_submodule("layers.0.proj"), WithLora)
    assert wrapped.get_submodule("layers.0.proj").base_layer is inner
    replaced = nn.Parameter(torch.zeros(2, 2))
    inner.weight = replaced
    assert plain.get_submodule("layers.0.proj").weight is replaced


def test_a_model_without_adapters_is_returned_itself() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]))
    plain.register_module("nothing", None)
    assert without_adapters(plain) is plain
