# SPDX-License-Identifier: Apache-2.0
"""The part that linear layers of every recipe share: parameters of another layer, shapes, and autocast."""

from abc import abstractmethod
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

Recipe = TypeVar("Recipe")


class RecipeLinear(nn.Linear, Generic[Recipe]):
    """Linear layer that multiplies as a recipe says.

    Shapes are those of `nn.Linear`: `[…, K]` to `[…, N]`, in the dtype of the input, or autocast's.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe: Recipe, **factory: Any
    ) -> None:
        """Make a layer with new weights. `factory`: `device` and `dtype`, as `nn.Linear` takes them."""
        super().__init__(in_features, out_features, bias, **factory)
        self.recipe = recipe

    @classmethod
    def of(cls, layer: nn.Linear, recipe: Recipe) -> Self:
        """Return a layer that has the parameters of another one, not copies of them."""
        made = cls(
            layer.in_features, layer.out_features, layer.bias is not None, recipe=recipe, device="meta"
        )
        made.weight, made.bias = layer.weight, layer.bias
        return made.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply `[…, K]` by the quantized weight: `[…, N]`.

        Raises:
            ValueError: Another number of columns than the layer's.
            NonFiniteError: A weight with NaN or infinity, on a CPU, where the recipe refuses it.
        """
        if input.shape[-1] != self.in_features:
            raise ValueError(f"input: expected [..., {self.in_features}], found {list(input.shape)}")
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            out = self.product(input.reshape(-1, self.in_features))
        return out.view(*input.shape[:-1], self.out_features)

    @abstractmethod
    def product(self, x_MK: Tensor) -> Tensor:
        """Multiply `[M, K]` by the quantized weight, and add the bias: `[M, N]`."""
