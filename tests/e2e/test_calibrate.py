# SPDX-License-Identifier: Apache-2.0
"""`fp8ext calibrate`: a server takes what it wrote."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from vllm_fp8ext.checkpoints import LATE, problems
from vllm_fp8ext.cli import cli
from vllm_fp8ext.demo.server import SMALL, Server
from vllm_fp8ext.kv_trainer import cached_kv, scales_of

from .ask import complete

PROMPTS = [[3 + index * 7 % 12 for index in range(start, start + 40)] for start in range(20)]
"""Digits and signs."""


@pytest.mark.full
@pytest.mark.fp8_kv
def test_a_calibrated_checkpoint_is_served(tmp_path: Path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "late-kv"
    file.write_text("\n".join(map(json.dumps, PROMPTS)))
    line = ["calibrate", str(LATE), "--out", str(out), "--prompts", str(file), *SMALL]
    line += ["--scale-format", "fp32", "--margin", "0.5", "--tokens", "400"]
    line += ["--additional-config", '{"fp8ext": {"staging": "inplace"}}']  # kept beside the scales' own
    done = CliRunner().invoke(cli, line, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "scales of 3 layers" in done.stdout

    kv = {"policy": "static"}
    arguments = (*SMALL, "--kv-cache-dtype", "fp8")
    with Server(out, tmp_path / "log", arguments=arguments, settings={"kv_scales": kv}) as server:
        server.wait()
        with server.client() as client:
            served = client.kv_scales()
            assert (served.policy, served.source) == ("static", "start")
            told = {
                f"{layer.removesuffix('.attn')}.{kind}_scale": values
                for layer, kinds in served.scales.items()
                for kind, values in kinds.items()
            }
            stored = {
                name: [tensor.item()] for name, tensor in load_file(out / "kv_scales.safetensors").items()
            }
            assert told == stored
        right = sum(
            complete(server, problem.prompt)["choices"][0]["text"] == problem.answer
            for problem in problems(10)
        )
        assert right == 10
        with server.client() as client:  # scales of a checkpoint are no news: static keeps those of the start
            assert client.push(out, version="again").version == "again"
            assert client.kv_scales().scales == served.scales
    # close to what the trainer's own model caches for the first 400 tokens: the server's weights are FP8
    model = Qwen3ForCausalLM.from_pretrained(LATE, dtype=torch.bfloat16)
    own = scales_of(cached_kv(model, PROMPTS[:10]), list(served.scales), margin=0.5, scale_format="fp32")
    for layer, kinds in own.items():
        for kind, [value] in kinds.items():
            assert abs(served.scales[layer][kind][0] / value - 1) < 0.05, (layer, kind)
