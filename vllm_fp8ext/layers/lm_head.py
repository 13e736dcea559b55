# SPDX-License-Identifier: Apache-2.0
"""Output layers in blockwise FP8, for the setting `lm_head` `blockfp8`.

An output layer with a weight of its own is quantized as a projection is. One that is the embedding keeps its weight in 16
bits, in which tokens are looked up, and multiplies by a copy in FP8 that follows the weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import blocks
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.layers import gemm
from vllm_fp8ext.layers.block_matrix import BlockMatrix
from vllm_fp8ext.layers.linear import CODES, SCALES, BlockFp8LinearMethod, KeptEmbeddingMethod
from vllm_fp8ext.layers.unquantized_layers import unfit

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "serve the output layer in FP8": (
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.num_embeddings_per_partition",
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.num_org_embeddings_per_partition",
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.embedding_dim",
        "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead.tie_weights(embed_tokens)",
    ),
    "know whether the output layer is the embedding": (
        "vllm.config:ModelConfig.word_embeddings_untied_by_checkpoint",
    ),
}

COPY = "fp8_copy"
"""Attribute of an output layer that is the embedding: its `HeadCopy`."""


class HeadMethod(BlockFp8LinearMethod):
    """An output layer with a weight of its own, in FP8. Rows that pad the vocabulary are zero."""

    def matrices(self, layer: torch.nn.Module) -> Iterator[BlockMatrix]:
        """The one matrix of the layer, without the rows that pad the vocabulary."""
        rows = layer.num_org_embeddings_per_partition
        scales = getattr(layer, SCALES, None)
        served = None if scales is None else scales.data[: blocks(rows)]
        yield BlockMatrix(CODES, layer.weight.data[:rows], served, CODES, SCALES)

    def allocate(self, layer: torch.nn.Module, device: torch.device) -> None:
        """Give a shadow's layer codes of zeros, and the scale that zeros have."""
        codes, scales = quantize_weight.empty_like(layer.weight, device)
        codes.zero_()
        scales.copy_(reference.scale_of(torch.zeros_like(scales), self.scale_format))
        self.adopt(layer, codes, scales)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Refuse a model that ties its output layer though its configuration does not say so."""
        raise ConfigError(
            "lm_head blockfp8: this model serves its embedding as its output layer, which tie_word_embeddings of its "
            "configuration does not say: expected it to say so (--hf-overrides '{\"tie_word_embeddings\": true}'), or "
            "lm_head bf16 or fp32"
        )


@dataclass
class HeadCopy:
    """The embedding in FP8: what `BlockFp8LinearMethod.apply` reads of a layer."""

    weight: Tensor
    """Codes `[N, K]` of this rank."""
    weight_scale_inv: Tensor
    dequantized: Tensor | None = None
    """On a CPU, by what the live model multiplies."""


HEAD_COPY_TENSORS = frozenset(f"{COPY}.{name}" for name in (CODES, SCALES, "dequantized"))
"""Tensors of a copy, as paths below its layer."""


class HeadCopyMethod(KeptEmbeddingMethod):
    """An output layer that is the embedding, or may turn out to be. `derive` makes its copy in FP8 anew."""

    def __init__(self, settings: Settings, *, shadow: bool = False) -> None:
        super().__init__()
        self.product = BlockFp8LinearMethod(settings)
        self.shadow = shadow

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *others: Any,
        **named: Any,
    ) -> None:
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *others, **named)
        shape = sum(output_partition_sizes), input_size_per_partition
        self.product.route = gemm.select(shape, self.product.out_dtype, self.product.settings.kernels)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Make the copy; a shadow's has no values before `derive`.

        Raises:
            NonFiniteError: NaN or infinity in the weight.
        """
        super().process_weights_after_loading(layer)
        copy: HeadCopy | None = getattr(layer, COPY, None)
        if copy is None:
            copy = HeadCopy(*quantize_weight.empty_like(layer.weight))
            setattr(layer, COPY, copy)
        if not self.shadow:
            scale_format = self.product.scale_format
            quantize_weight.quantize_weight(layer.weight, copy.weight, copy.weight_scale_inv, scale_format)
            self.product.derive(copy)

    def derive(self, layer: torch.nn.Module) -> None:
        """Rebuild the copy in place, so that addresses stay. On a GPU this is queued on the current stream."""
        copy: HeadCopy = getattr(layer, COPY)
        quantize_weight.queue(layer.weight, copy.weight, copy.weight_scale_inv, self.product.scale_format)
        if not self.shadow:
            self.product.derive(copy)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.product.apply(getattr(layer, COPY), x, bias)


def head_method(
    settings: Settings, layer: ParallelLMHead, config: ModelConfig, *, shadow: bool
) -> HeadMethod | HeadCopyMethod:
    """Choose the method of an output layer that is served in FP8.

    Raises:
        ConfigError: FP8 kernels do not take its shape.
    """
    rows, columns = layer.num_embeddings_per_partition, layer.embedding_dim
    problem = unfit(rows, columns, str(config.dtype).removeprefix("torch."))
    if problem:
        raise ConfigError(
            f"lm_head blockfp8: {layer.prefix} {problem}; expected lm_head bf16 or fp32, or other ranks"
        )
    if is_tied(config):
        return HeadCopyMethod(settings, shadow=shadow)
    return HeadMethod(settings, shadow=shadow)


def is_tied(config: ModelConfig) -> bool:
    """Tell whether the configuration says that the output layer is the embedding.

    The checkpoint may hold one all the same.
    """
    says = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
    return says or bool(config.word_embeddings_untied_by_checkpoint)


def head_copies(model: nn.Module) -> Iterator[tuple[Any, HeadCopyMethod]]:
    """Yield each output layer that multiplies by a copy of the embedding, and its method."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, HeadCopyMethod):
            yield module, method


def products(model: nn.Module) -> Iterator[tuple[Any, BlockFp8LinearMethod]]:
    """Yield what multiplies in FP8 but experts: holders of `weight` and `weight_scale_inv`, and their methods."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, BlockFp8LinearMethod):
            yield module, method
        elif isinstance(method, HeadCopyMethod):
            yield getattr(module, COPY), method.product


def require_head(model: nn.Module) -> None:
    """Raise `ConfigError` if no output layer is served in FP8."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    if not any(isinstance(method, HeadMethod | HeadCopyMethod) for method in methods):
        raise ConfigError(
            "lm_head blockfp8: expected an output layer that asks its quantization, found none in this model: serve it "
            "with lm_head bf16 or fp32"
        )
