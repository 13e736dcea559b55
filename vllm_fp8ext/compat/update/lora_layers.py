# SPDX-License-Identifier: Apache-2.0
"""Shows a model without the wrappers in which vLLM puts layers that take LoRA adapters.

An update changes the weights of the layers inside. Adapters stay as they were loaded: they are no part of an update.
"""

import copy

from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA

FEATURE: str = "core"
WHY: str = "Find a model's layers where the shadow has them: vLLM puts each into a module that adds adapters."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "find the layers that adapters are added to": ("vllm.lora.layers:BaseLayerWithLoRA",),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM adds adapters without replacing layers"


def without_adapters(module: nn.Module) -> nn.Module:
    """Return a module's tree without wrappers; one that holds none is returned itself.

    Modules that hold a wrapper are shallow copies, which share their parameters and buffers. All others are the model's own.
    """
    if isinstance(module, BaseLayerWithLoRA):
        return without_adapters(module.base_layer)
    children = {
        name: None if child is None else without_adapters(child) for name, child in module._modules.items()
    }
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    plain = copy.copy(module)
    plain._modules = children
    return plain
