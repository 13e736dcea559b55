# SPDX-License-Identifier: Apache-2.0
"""A small mixture of experts with random weights: what an update leaves is what a cold start makes, byte for byte."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from vllm_fp8ext.weights.digest import Digests, checkpoint_digests
from vllm_fp8ext.weights.manifest import Manifest

WIDTH = 192
"""Of an expert: no multiple of 128, and on two ranks not even one block."""
EXPERTS = 7
"""Not as many on one rank as on the other."""

Story = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An early and a late checkpoint of one shape."""
    folder = tmp_path_factory.mktemp("mixtures")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    experts = {"moe_intermediate_size": WIDTH, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, vocab_size=128, **heads, **experts
    )
    for seed, name in enumerate(("early", "late")):
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder / name)
    return {name: folder / name for name in ("early", "late")}


@pytest.fixture(scope="module")
def story(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Runs `experts_story` once for each setting."""
    done: dict[tuple[str, ...], dict[str, Any]] = {}
    folder = tmp_path_factory.mktemp("stories")

    def run(early: str, staging: str = "shadow", ranks: int = 1, shared_out: str = "no") -> dict[str, Any]:
        key = (early, staging, str(ranks), shared_out)
        if key not in done:
            out = folder / f"{'-'.join(key)}.json"
            paths = [str(checkpoints[early]), str(checkpoints["late"])]
            line = [sys.executable, "-P", str(Path(__file__).with_name("experts_story.py"))]
            bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}
            ended = subprocess.run(
                [*line, *paths, *key[1:], str(out)],
                capture_output=True,
                text=True,
                timeout=400,
                env=os.environ | bind,
            )
            assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
            done[key] = json.loads(out.read_text())
        return done[key]

    return run


SETTINGS = {
    "one rank": (),
    "two ranks": ("shadow", 2),
    "two ranks that share out experts": ("shadow", 2, "yes"),
    "in place": ("inplace",),
}


@pytest.fixture(scope="module", params=SETTINGS)
def facts(request: pytest.FixtureRequest, story: Story) -> dict[str, Any]:
    return story("early", *SETTINGS[request.param])


def expected(facts: dict[str, Any], path: Path) -> Digests:
    return checkpoint_digests(path, Manifest.from_dict(facts["manifest"]))


def test_what_is_served_is_what_the_checkpoint_makes(
    facts: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    early, late = (expected(facts, checkpoints[name]) for name in ("early", "late"))
    assert facts["cold digests"]["digests"] == facts["early digests"]["digests"] == early
    assert facts["late digests"]["digests"] == late
    matrices = [name for name in early if name.endswith("_proj.weight")]
    assert all(early[name] != late[name] for name in matrices)


def test_some_matrices_of_some_experts_are_updated(
    facts: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    early, late = (expected(facts, checkpoints[name]) for name in ("early", "late"))
    chosen = set(facts["some"])
    assert len(chosen) == 8
    assert facts["some digests"]["digests"] == {
        name: (late if name in chosen else early)[name] for name in early
    }
    assert facts["verified"] == "some experts"


def test_outputs_follow_the_weights(facts: dict[str, Any]) -> None:
    assert facts["early again"] == facts["early"]
    assert facts["late"] != facts["early"]
    assert facts["late digests"]["addresses"] == facts["cold digests"]["addresses"]


def test_an_update_serves_what_a_cold_start_serves(story: Story) -> None:
    cold, updated = story("late"), story("early")
    assert updated["late"] == cold["early"]
    assert updated["late digests"]["digests"] == cold["cold digests"]["digests"]


def test_each_rank_has_experts_of_its_own(story: Story) -> None:
    tensors = story("early", *SETTINGS["two ranks that share out experts"])["manifest"]["tensors"]
    for expert in range(EXPERTS):
        name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
        (piece,) = tensors[name]["pieces"]
        rank, local = divmod(expert, 4)
        assert (piece["rank"], piece["target_shape"]) == (rank, [256, WIDTH])
        assert piece["target"].endswith(f"w2_weight[{local}]")
    assert len(tensors["model.layers.0.mlp.gate.weight"]["pieces"]) == 2


def test_routers_stay_as_they_are(facts: dict[str, Any]) -> None:
    for name, tensor in facts["manifest"]["tensors"].items():
        quantized = {piece["quantized"] for piece in tensor["pieces"]}
        assert quantized == {name.endswith("_proj.weight")}, name
