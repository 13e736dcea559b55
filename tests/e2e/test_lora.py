# SPDX-License-Identifier: Apache-2.0
"""Base weights change under adapters, which stay."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .ask import complete
from .conftest import OPTIONS, answering
from .plugins import variables

pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(1200)]

RANK, LAYERS = 8, 3
SHAPES = {
    "self_attn.q_proj": (256, 256),
    "self_attn.v_proj": (256, 128),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (256, 640),
    "mlp.down_proj": (640, 256),
}
"""Inputs and outputs of the layers that get an adapter."""
PROMPT = [5, 6, 7, 8] * 16
TOKENS = 16


def write_adapter(folder: Path) -> Path:
    """Write a random adapter in PEFT's format, large enough to change every answer."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, inputs, generator=draw) / 50
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, RANK, generator=draw) / 3
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in SHAPES})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def served(server: Server, model: str) -> list[int]:
    """Greedy tokens of the base model, or of an adapter."""
    choice = complete(server, PROMPT, TOKENS, model=model, ignore_eos=True)["choices"][0]
    with server.client() as client:
        weights = client.weights()
    [span] = choice["weight_versions"]
    assert (span["version"], span["epoch"], span["end"]) == (weights.version, weights.epoch, TOKENS)
    tokens: list[int] = choice["token_ids"]
    return tokens


def test_base_weights_change_under_an_adapter(tmp_path: Path) -> None:
    """An updated server with an adapter equals one that was started so. The cache is apart by epoch."""
    adapter = write_adapter(tmp_path / "adapter")
    options = (
        *OPTIONS,
        "--enable-lora",
        "--max-lora-rank",
        str(RANK),
        "--lora-modules",
        f"adapter={adapter}",
    )
    early, late = (
        Server(
            folder,
            tmp_path / f"{folder.name}.log",
            arguments=options,
            variables=variables(tmp_path / folder.name),
        )
        for folder in (EARLY, LATE)
    )
    with answering(early, late), early.client() as client:
        base, adapted = served(early, "model"), served(early, "adapter")
        assert base != adapted
        client.push(LATE, version="late")
        assert client.digests().digests == checkpoint_digests(LATE)
        assert served(early, "model") == served(late, "model") != base
        assert served(early, "adapter") == served(late, "adapter") != adapted
        client.rollback()
        assert (served(early, "model"), served(early, "adapter")) == (base, adapted)
        off = {one.name for one in client.weights().features if one.reason == "LoRA adapters"}
        assert "decode_step_reuse" in off
        assert client.verify().epoch == 2
