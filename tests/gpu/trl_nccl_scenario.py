# SPDX-License-Identifier: Apache-2.0
"""TRL's `GRPOTrainer` in server mode over NCCL, three steps. Writes what it saw, as JSON, to a file.

`full`: all weights; `lora`: adapters that TRL merges; `killed`: as `full`, until it is killed in the middle of its second
broadcast.
"""

import copy
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client

from vllm_fp8ext.checkpoints import EARLY, problems
from vllm_fp8ext.serve.client import Client

STEPS, EACH, TOKENS = 3, 4, 8


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of even tokens: something that can be learnt of random weights."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def kill_in_the_second_broadcast() -> None:
    """Send all tensors but the last, then be gone."""
    original, calls = vllm_client.packed_nccl_broadcast_producer, 0

    def producer(iterator: Iterator[Any], **more: Any) -> None:
        nonlocal calls
        calls += 1
        items = list(iterator)

        def until_the_last() -> Iterator[Any]:
            yield from items[:-1]
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)

        original(iterator=iter(items) if calls == 1 else until_the_last(), **more)

    vllm_client.packed_nccl_broadcast_producer = producer


def trained(url: str, model: Path, folder: Path, lora: bool) -> GRPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(EARLY)
    asked = problems(STEPS * 2, seed=5)
    adapters = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "o_proj", "down_proj"])
    prompts = {"prompt": [found.prompt for found in asked]}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset(InMemoryTable.from_pydict(prompts), fingerprint="problems"),
        peft_config=adapters if lora else None,
        args=GRPOConfig(
            output_dir=str(folder / "trainer"),
            max_steps=STEPS,
            per_device_train_batch_size=EACH,
            num_generations=EACH,
            max_completion_length=TOKENS,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            vllm_group_port=int(os.environ["GROUP_PORT"]),
            generation_kwargs={"allowed_token_ids": list(range(len(tokenizer)))},
        ),
    )
    trainer.train()
    save(trainer.accelerator.unwrap_model(trainer.model), folder)
    trainer.vllm_generation.sync_weights()
    return trainer


def save(model: Any, folder: Path) -> None:
    """Write down the weights that must be served."""
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    tensors = model.state_dict()
    tensors.pop("lm_head.weight", None)  # the model shares its embedding
    save_file(
        {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


def main(out: Path, url: str, key: str, model: Path, folder: Path, way: str) -> None:
    torch.manual_seed(0)
    if way == "killed":
        kill_in_the_second_broadcast()
    trainer = trained(url.replace("http://", f"http://x:{key}@"), model, folder, lora=way == "lora")
    with Client(url, key) as weights:
        facts = {"epoch": weights.verify().epoch, "digests": weights.digests().digests}
    out.write_text(json.dumps({**facts, "steps": trainer.state.global_step}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6])
