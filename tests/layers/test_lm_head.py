# SPDX-License-Identifier: Apache-2.0
"""Output layers in FP8: rows that pad the vocabulary, and which layers are taken."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.testing.kernel_cases import same
from vllm_fp8ext.layers.lm_head import HeadMethod, head_method, is_tied, require_head
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget

CPU = torch.device("cpu")


class Head(nn.Module):
    """A `ParallelLMHead` of a shadow as far as its method looks at it."""

    def __init__(self, rows: int, padded: int, columns: int) -> None:
        super().__init__()
        self.num_org_embeddings_per_partition = rows
        self.weight = nn.Parameter(torch.empty(padded, columns, device="meta"), requires_grad=False)
        self.quant_method = object.__new__(HeadMethod)  # to make one takes a configuration of vLLM's
        self.quant_method.scale_format = "fp32"


@pytest.mark.parametrize(("rows", "padded"), [(370, 384), (120, 192), (128, 192), (256, 256)])
def test_rows_that_pad_a_vocabulary_never_come_and_are_zero(rows: int, padded: int) -> None:
    """Codes and scales are those of a weight that is loaded with them."""
    head = Head(rows, padded, 256)
    head.quant_method.allocate(head, CPU)
    [matrix] = head.quant_method.matrices(head)
    assert matrix.values.shape == (rows, 256)
    assert matrix.scales is not None
    weight = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))
    target = QuantizedTarget(matrix.values, matrix.scales, torch.float32, "fp32")
    for start in range(0, rows, 50):
        for first in range(start, min(start + 50, rows), 25):
            target.fill(first, weight[first : min(first + 25, rows, first // 128 * 128 + 128)], (0, rows))
            cut = first // 128 * 128 + 128
            if cut < min(first + 25, rows):
                target.fill(cut, weight[cut : min(first + 25, rows)], (0, rows))
    loaded = reference.quantize_weight(torch.cat([weight, torch.zeros(padded - rows, 256)]))
    assert same(head.weight.data, loaded[0])
    assert torch.equal(head.weight_scale_inv.data, loaded[1])


def test_a_head_of_an_odd_shape_is_refused() -> None:
    layer: Any = SimpleNamespace(num_embeddings_per_partition=160, embedding_dim=256, prefix="lm_head")
    config: Any = SimpleNamespace(dtype=torch.bfloat16)
    with pytest.raises(
        ConfigError, match=r"lm_head blockfp8: lm_head of 160x256: FP8 kernels .* multiples of 64"
    ):
        head_method(Settings(lm_head="blockfp8"), layer, config, shadow=False)


def test_a_model_that_ties_unsaid_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected it to say so .* or lm_head bf16 or fp32"):
        object.__new__(HeadMethod).tie_weights(nn.Module(), nn.Module())


def test_a_model_without_a_head_that_asks_is_refused() -> None:
    model = nn.ModuleList([nn.Linear(1, 1)])
    with pytest.raises(ConfigError, match="expected an output layer that asks its quantization, found none"):
        require_head(model)
    model.append(Head(64, 64, 128))
    require_head(model)


@pytest.mark.parametrize(
    ("says", "untied_by_checkpoint", "tied"),
    [(True, False, True), (False, True, True), (False, False, False)],
)
def test_what_may_be_the_embedding_counts_as_tied(says: bool, untied_by_checkpoint: bool, tied: bool) -> None:
    text = SimpleNamespace(tie_word_embeddings=says)
    config: Any = SimpleNamespace(
        hf_text_config=text, word_embeddings_untied_by_checkpoint=untied_by_checkpoint
    )
    assert is_tied(config) is tied
