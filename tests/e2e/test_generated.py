# SPDX-License-Identifier: Apache-2.0
"""Generated checkpoints of every architecture are served: benchmarks on a GPU start on them."""

import math
from pathlib import Path

import pytest

from vllm_fp8ext.bench.model_shapes import MODEL_SHAPES

from .scenarios import SECONDS, run_scenario
from .vision import has_torchvision

NEED_VISION = ("Qwen2.5-VL-7B", "Qwen3.5-9B")
pytestmark = [pytest.mark.full, pytest.mark.timeout(SECONDS + 60)]


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_an_engine_serves_a_small_one(name: str, tmp_path: Path) -> None:
    vision = name in NEED_VISION
    if vision and not has_torchvision():
        pytest.skip("vLLM reads this family only with torchvision")
    tokens, logprobs, text = run_scenario("generated_scenario.py", tmp_path, name, vision=vision)
    assert len(tokens) == 8
    assert all(math.isfinite(logprob) for logprob in logprobs)
    assert text
