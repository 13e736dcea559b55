# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's table for GPT-J 6B on an H100: the largest batch is 75 in FP16, 85 with FP8 weights, over twice 75 with an FP8 KV
cache as well.

The page that printed 75 and 85 was not found again, so neither were its lengths. What was found is TensorRT-LLM's
docs/source/blogs/quantization-in-TRT-LLM.md (at 2ee99e8): GPT-J on an H100 80GB with 1,024 tokens in and 128 out, and "2-3x
larger batch size on H100 machine for models like GPT-J" from an FP8 KV cache.

Inferred, then: requests of 1,024 + 128 tokens, as on that page, and a memory that holds just 75 of them in FP16. The 85 and
the "over twice" follow from the shapes, with nothing left to choose. Lengths from 1,105 to 1,216 tokens give 85, shorter and
longer ones do not. It is not the only reading: that memory is 54 GB with the activations that `overhead` estimates, and an
H100 has 85. Requests of some 1,920 tokens fill all of it with 75 and 85 too, if activations took 6.5 GB in FP16 and half of
that in FP8; but then two numbers are chosen, for two rows.
"""

import pytest
from transformers import GPTJConfig

from vllm_fp8ext.memory_plan.memory import Row, Serving, overhead, page_bytes, rows, weight_memory
from vllm_fp8ext.memory_plan.model import Model, shapes

TOKENS = 1024 + 128


@pytest.fixture(scope="module")
def gptj() -> Model:
    return shapes(GPTJConfig(), "GPT-J 6B")


def planned(gptj: Model, batch: int, tokens: int = TOKENS) -> dict[tuple[str, str], Row]:
    """Rows without a shadow, in the least memory that holds so many requests in 16 bits."""
    serving = Serving(context=tokens, total=1)
    blocks = batch * -(-tokens // serving.block_size) + 1
    total = weight_memory(gptj, 1, fp8=False) + overhead(gptj, serving)
    total += blocks * page_bytes(gptj, serving, fp8=False) * len(gptj.windows)
    result = rows(gptj, Serving(context=tokens, total=total, utilization=1.0))
    return {(row.weights, row.kv): row for row in result if not row.twin_bytes}


def test_the_published_sizes(gptj: Model) -> None:
    """6.05 billion parameters; K and V of 28 layers and 4,096 channels, two bytes each."""
    row = planned(gptj, 75)["bf16", "bf16"]
    assert row.weight_bytes == 2 * 6_050_882_784
    assert row.kv_bytes_per_token == 2 * 28 * 4096 * 2


def test_the_table(gptj: Model) -> None:
    result = planned(gptj, 75)
    assert result["bf16", "bf16"].batch == 75
    assert result["fp8", "bf16"].batch == 85
    assert 2 * 75 < result["fp8", "fp8"].batch < 3 * 75


@pytest.mark.parametrize(("tokens", "batch"), [(128, 170), (1104, 86), (1217, 84), (2048, 80)])
def test_other_lengths_give_another_table(gptj: Model, tokens: int, batch: int) -> None:
    """The 85 is a prediction of the length that was inferred, not of any."""
    assert planned(gptj, 75, tokens)["fp8", "bf16"].batch == batch
