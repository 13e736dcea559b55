# SPDX-License-Identifier: Apache-2.0
"""Replaces linear layers of a model by FP8 ones. Layers that the server keeps in 16 bits stay."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from vllm_fp8ext.kernels.numerics.reference import BLOCK
from vllm_fp8ext.trainer.fp4 import Fp4Linear, Fp4Recipe
from vllm_fp8ext.trainer.linear import BlockFp8Linear
from vllm_fp8ext.trainer.recipes import BlockScaling, CurrentScaling
from vllm_fp8ext.trainer.tensor_linear import TensorFp8Linear

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_q", "in_proj_k", "in_proj_v"),
)
"""Names of layers that a server multiplies as one matrix, from top to bottom."""
HEADS = frozenset({"lm_head", "score", "classifier", "embed_out", "output_projection"})
"""Names of output layers, which the server keeps."""
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of layers that choose experts, which the server keeps."""
DECAYS = frozenset({"in_proj_ba", "in_proj_a", "in_proj_b"})
"""Names of projections that decide the decay of states, which the server keeps."""
ENCODERS = frozenset(
    {
        *("visual", "vision_tower", "vision_model", "vision_encoder", "vision_backbone", "image_encoder"),
        *("audio_tower", "audio_encoder", "encoder"),
    }
)
"""Names of modules that read images or sound, which the server keeps."""
ROWS_MULTIPLE = 64
"""Multiple of rows that the server's kernels take."""
TENSOR_MULTIPLE = 16
"""Multiple of rows and columns that products with one scale per tensor take."""

Recipe: TypeAlias = BlockScaling | CurrentScaling | Fp4Recipe
"""All recipes: `DelayedScaling` is a `CurrentScaling` with a memory."""


@dataclass(frozen=True)
class Conversion:
    """Report of `convert`."""

    converted: tuple[str, ...]
    """Names of layers that compute in FP8."""
    kept: Mapping[str, str]
    """Reasons by the names of linear layers, and of experts, that stay as they were."""


def convert(
    model: nn.Module, recipe: Recipe, *, ignore: Iterable[str] = (), quantize: Iterable[str] = ()
) -> Conversion:
    """Replace linear layers of a model in place; parameters stay the same objects, under the same names.

    Args:
        model: modules as transformers names them. A model that is a linear layer itself has no name to be replaced under.
        recipe: what the new layers compute with.
        ignore: patterns of names that stay, as the server's `ignore`.
        quantize: patterns of names that are converted although a server keeps them by default, as the server's `quantize`.

    Raises:
        ValueError: No layer to convert, a pattern that matches none, or a layer that `quantize` names and the recipe cannot
            take. All problems are listed, and the model stays as it was.
    """
    ignored, wanted = tuple(ignore), tuple(quantize)
    modules = dict(model.named_modules())
    linear = {name: module for name, module in modules.items() if name and isinstance(module, nn.Linear)}
    groups = _groups(linear)
    problems = [
        f"{pattern}: expected a pattern of linear layers' names, found none that it matches"
        for pattern in (*ignored, *wanted)
        if not any(fnmatchcase(name, pattern) for name in linear)
    ]
    kept: dict[str, str] = dict(_experts(model))
    chosen: list[str] = []
    for name, layer in linear.items():
        forced = _matches(name, wanted)
        unfit = _unfit(layer, groups[name], recipe)
        reason = "ignored" if _matches(name, ignored) else unfit if forced else _kept_by_name(name) or unfit
        if forced and unfit:
            problems.append(f"{name}: expected a layer for {type(recipe).__name__}, found one {unfit}")
        if reason:
            kept[name] = reason
        else:
            chosen.append(name)
    for name in chosen:
        split = [each for each, layer in linear.items() if layer in groups[name] and each in kept]
        if split and isinstance(recipe, BlockScaling):
            problems.append(f"{name}: expected all layers of one matrix of the server, found {split} kept")
    if not chosen and not problems:
        problems.append(f"model: expected linear layers to convert, found {len(linear)}, all kept: {kept}")
    if problems:
        raise ValueError("\n".join(problems))
    _replace(modules, linear, groups, chosen, recipe)
    return Conversion(tuple(chosen), kept)


def _replace(
    modules: dict[str, nn.Module],
    linear: dict[str, nn.Linear],
    groups: dict[str, tuple[nn.Linear, ...]],
    chosen: list[str],
    recipe: Recipe,
) -> None:
    made: dict[nn.Linear, BlockFp8Linear] = {}
    places: dict[nn.Module | None, list[tuple[nn.Module, str]]] = defaultdict(
        list
    )  # a layer may have several
    for parent in modules.values():
        for child, module in parent._modules.items():
            places[module].append((parent, child))
    for name in chosen:
        layer = linear[name]
        replacement: nn.Linear
        if isinstance(recipe, BlockScaling):
            replacement = made[layer] = BlockFp8Linear.of(layer, recipe)
        elif isinstance(recipe, CurrentScaling):
            replacement = TensorFp8Linear.of(layer, recipe)
        else:
            replacement = Fp4Linear.of(layer, recipe)
        for parent, child in places[layer]:
            setattr(parent, child, replacement)
    for name in chosen:
        if linear[name] in made:
            made[linear[name]].fuse(tuple(made[layer] for layer in groups[name]))


def _groups(linear: dict[str, nn.Linear]) -> dict[str, tuple[nn.Linear, ...]]:
    """Find, by name, the layers that are one matrix on a server."""
    groups = {}
    for name, layer in linear.items():
        parent, _, child = name.rpartition(".")
        names = next((group for group in FUSED if child in group), (child,))
        paths = [f"{parent}.{each}" if parent else each for each in names]
        groups[name] = tuple(linear[path] for path in paths if path in linear) if len(names) > 1 else (layer,)
    return groups


def _kept_by_name(name: str) -> str | None:
    parts = name.split(".")
    if parts[-1] in HEADS:
        return "an output layer"
    if parts[-1] in ROUTERS:
        return "a router of experts"
    if parts[-1] in DECAYS:
        return "decides the decay of states"
    return "part of an encoder" if ENCODERS & set(parts) else None


def _unfit(layer: nn.Linear, group: tuple[nn.Linear, ...], recipe: Recipe) -> str | None:
    """Say why the recipe does not take a layer; None if it does."""
    if type(layer) is not nn.Linear:
        return f"of type {type(layer).__name__}, not nn.Linear"
    if not layer.weight.is_floating_point() or layer.weight.dtype.itemsize < 2:
        return f"of dtype {layer.weight.dtype}, not a floating one of 16 bits or more"
    rows, columns = sum(each.out_features for each in group), layer.in_features
    if not isinstance(recipe, BlockScaling):
        rows = layer.out_features
        multiples = TENSOR_MULTIPLE, TENSOR_MULTIPLE
    else:
        multiples = ROWS_MULTIPLE, BLOCK
    if rows % multiples[0] or columns % multiples[1]:
        return f"of {rows}x{columns}, not multiples of {multiples[0]} rows and {multiples[1]} columns"
    return None


def _experts(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and "experts" in name.split("."):
            yield name, "fused experts are not linear layers: train them in 16 bits"


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
