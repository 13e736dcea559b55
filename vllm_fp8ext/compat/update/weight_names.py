# SPDX-License-Identifier: Apache-2.0
"""Finds other names of checkpoint tensors.

Those are the names that vLLM's mapper of a model takes, and those of the same model in transformers, which `state_dict()`
has; and names of output layers that are served as the embedding.
"""

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.worker.alias_names import AliasCandidate, ModelNames

FEATURE: str = "core"
WHY: str = "Know a model's other names: vLLM does not tell under which names a model's loader takes a tensor."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "know a model's other names": (
        "vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper",
        "vllm.model_executor.models.utils:WeightsMapper.map_name(key)",
        "vllm.model_executor.models.utils:WeightsMapper._map_name_with_shard(key)",
        "vllm.model_executor.models.utils:WeightsMapper.orig_to_new_prefix",
        "vllm.model_executor.models.utils:WeightsMapper.orig_to_new_substr",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM tells under which names a model's loader takes a tensor"

logger = logging.getLogger("vllm.fp8ext")

_HEAD = "lm_head.weight"
"""The name that nearly all checkpoints have for the output layer."""

Shape = tuple[int, ...]


def names_of_mapper(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map other names that the model's mapper makes the same of to these names.

    A name that means two is left out.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if not isinstance(mapper, WeightsMapper):
        return {}
    names = set(names)
    pairs = ((other, name) for name in names for other in _taken_alike(mapper, name))
    return _unique(pairs, names)


def _taken_alike(mapper: WeightsMapper, name: str) -> set[str]:
    """Find names that are mapped as this one is."""
    own_name = mapper.get_rename_mapper().map_name(name)
    if own_name is None:
        return set()
    prefixes, parts = ([pair for pair in rules.items() if all(pair)] for rules in _rules(mapper))
    begun = {
        own_name,
        *(old + own_name.removeprefix(new) for old, new in prefixes if own_name.startswith(new)),
    }
    candidates = begun | {one.replace(new, old, 1) for one in begun for old, new in parts if new in one}
    taken = mapper._map_name_with_shard(name)
    return {other for other in candidates - {name} if mapper._map_name_with_shard(other) == taken}


def _rules(mapper: WeightsMapper) -> tuple[Mapping[str, str | None], Mapping[str, str | None]]:
    return mapper.orig_to_new_prefix, mapper.orig_to_new_substr


def names_in_transformers(config: Any, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Map names in transformers' model to tensors that it names otherwise than the checkpoint.

    Fused experts count as tensors.
    """
    try:
        if not _renames(config):
            return {}
        own_shapes, renamings = _model_of(config)
    except Exception as error:  # a model that transformers does not have, or not so
        logger.info("blockfp8: names of transformers' %s are not known: %s", config.architectures, error)
        return {}

    def pairs() -> Iterator[tuple[str, str]]:
        for name, shape in shapes.items():
            other = name
            for renaming in renamings:
                other, _ = renaming.rename_source_key(other)
            if own_shapes.get(other) == shape:
                yield other, name

    return _unique(pairs(), shapes)


def _renames(config: Any) -> bool:
    """Tell whether transformers renames anything of such a checkpoint: to make the model takes seconds."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    known = [*(config.architectures or ()), config.model_type]
    known += [part.model_type for part in vars(config).values() if hasattr(part, "model_type")]
    rules = [rule for name in known for rule in get_checkpoint_conversion_mapping(name) or ()]
    return any(isinstance(rule, WeightRenaming) for rule in rules)


def _model_of(config: Any) -> tuple[dict[str, Shape], list[Any]]:
    """Shapes of transformers' model by name, and how it renames a checkpoint's tensors."""
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    kind = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model = kind(copy.deepcopy(config))
    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, rules


def _unique(pairs: Iterable[tuple[str, str]], names: Collection[str]) -> dict[str, str]:
    unique: dict[str, str] = {}
    twice = set()
    for other, name in pairs:
        if other not in names and unique.setdefault(other, name) != name:
            twice.add(other)
    return {other: name for other, name in unique.items() if other not in twice}


def names_of(model: nn.Module, config: Any, *, tied: bool) -> ModelNames:
    """Make the names of a model with this transformers configuration. `tied`: as in `tied_heads`."""

    def others(manifest: Manifest, specs: Sequence[TensorSpec]) -> Iterator[AliasCandidate]:
        shapes = {spec.name: spec.shape for spec in specs}
        shapes |= {name: whole.shape for name, whole in manifest.fused.items()}
        for other, name in names_of_mapper(model, shapes.keys() | manifest.tied.keys()).items():
            yield AliasCandidate(other, name, sure=name not in manifest.tensors)
        for other, name in names_in_transformers(config, shapes).items():
            yield AliasCandidate(other, name, sure=True)

    return ModelNames(heads=tied_heads(model, tied=tied), aliases=others)


def tied_heads(model: nn.Module, *, tied: bool) -> dict[str, list[str]]:
    """Map embeddings that are the output layer, too, to that layer's possible names.

    `tied`: the model is one whose output layer is its embedding, even where the class makes none.
    """
    embeddings: dict[int, str] = {}
    heads_of: dict[str, list[str]] = {}
    heads = 0
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            heads += isinstance(module, ParallelLMHead)
            weight = f"{path}.weight"
            embedding = embeddings.setdefault(id(module.weight), weight)
            if embedding != weight:
                heads_of[embedding] = [*sorted(names_of_mapper(model, [weight])), weight]
    if tied and not heads:
        heads_of |= {path: [_HEAD] for path in list(embeddings.values())[:1]}
    return {path: sorted(names, key=lambda name: name != _HEAD) for path, names in heads_of.items()}
