# SPDX-License-Identifier: Apache-2.0
"""Ties output layers to the embedding in the shadow, where vLLM has tied them.

A checkpoint whose configuration ties them and that has an output layer all the same is loaded untied; where both turn out to
be equal, vLLM ties them after loading.
"""

import torch
from torch import nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_fp8ext.errors import ConfigError

FEATURE: str = "core"
WHY: str = "Tie the shadow's output layer as the served one's: vLLM ties it after loading."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "tie the shadow's output layer as the served one's": (
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.tie_weights("
        "layer, embed_tokens)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM ties them where a model is made"


def tie_alike(live: nn.Module, shadow: nn.Module) -> None:
    """Tie in the shadow each output layer that is tied in live. All ranks together.

    Raises:
        ConfigError: ranks found their parts of the output layer equal to the embedding, and others did not.
    """
    tied, known = (_tied_heads(model) for model in (live, shadow))
    _require_same_on_all_ranks(tied)
    for head, embedding in tied.items():
        if head not in known:
            layer, of = (shadow.get_submodule(path.rpartition(".")[0]) for path in (head, embedding))
            assert isinstance(layer, VocabParallelEmbedding)
            layer.quant_method.tie_weights(layer, of)


def _tied_heads(model: nn.Module) -> dict[str, str]:
    """Map paths of tied weights to the first path of each."""
    firsts: dict[int, str] = {}
    tied: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            first = firsts.setdefault(id(module.weight), f"{path}.weight")
            if first != f"{path}.weight":
                tied[f"{path}.weight"] = first
    return tied


def _require_same_on_all_ranks(tied: dict[str, str]) -> None:
    group = get_tp_group()
    gathered: list[dict[str, str] | None] = [None] * group.world_size
    torch.distributed.all_gather_object(gathered, tied, group=group.cpu_group)
    if any(other != tied for other in gathered):
        raise ConfigError(
            "the checkpoint's output layer (lm_head.weight) equals the embedding in the rows of some ranks alone, and the "
            "configuration says tie_word_embeddings: set it to false there to serve both as they are"
        )
