# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers against a server, by vLLM's weight transfer, three steps. Writes what it saw, as JSON, to a file.

`grpo`: `GRPOTrainer` in server mode; `async`: `AsyncGRPOTrainer`. `full`: all weights; `lora`: adapters that TRL merges;
`killed`: as `full`, until it is killed in the middle of its second update. Replaced is what cannot be here: the attention
kernel that `AsyncGRPOTrainer` fetches from a hub by vLLM's FlashAttention 3 and, without a GPU, NCCL by Gloo and that kernel
by torch.
"""

import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from tree_attention import flash_attn_varlen_func
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
    weight_transfer,
)
from trl.experimental.async_grpo import vllm_client as async_client
from trl.generation import vllm_client
from trl_training import merged_tensors

from vllm_fp8ext.checkpoints import EARLY, problems
from vllm_fp8ext.serve.client import Client

STEPS, EACH, TOKENS = 3, 4, 8
"""Steps of training, answers to a prompt, tokens of an answer."""
GPU = torch.cuda.is_available()


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of even tokens: something that can be learnt of random weights."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def without_gpu() -> None:
    """Put Gloo in place of what needs a GPU: the group, its broadcasts, and the device that TRL asks for and measures."""
    from gloo_trainer import open_trainer_endpoint, packed_broadcast_producer

    for module in (vllm_client, weight_transfer):
        module.open_trainer_endpoint = open_trainer_endpoint
        module.packed_nccl_broadcast_producer = packed_broadcast_producer
    original = vllm_client.VLLMClient.init_communicator
    vllm_client.VLLMClient.init_communicator = lambda self, device=0: original(self, device="cuda")
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def kill_in_the_second_update(module: Any) -> None:
    """Send all tensors but the last, then be gone."""
    original, calls = module.packed_nccl_broadcast_producer, 0

    def producer(iterator: Iterator[Any], **more: Any) -> None:
        nonlocal calls
        calls += 1
        items = list(iterator)

        def until_the_last() -> Iterator[Any]:
            yield from items[:-1]
            if GPU:
                torch.cuda.synchronize()
            time.sleep(2)  # the server is told beside, and must wait for a broadcast
            os.kill(os.getpid(), signal.SIGKILL)

        original(iterator=iter(items) if calls == 1 else until_the_last(), **more)

    module.packed_nccl_broadcast_producer = producer


def timed_updates(client: Any, start: str, finish: str) -> list[float]:
    """Measure what a class of clients does: seconds from each call of `start` to the answer of `finish`."""
    seconds: list[float] = []
    begun = [0.0]
    starting, finishing = getattr(client, start), getattr(client, finish)

    def begin(self: Any, *given: Any, **more: Any) -> Any:
        begun[0] = time.perf_counter()
        return starting(self, *given, **more)

    def end(self: Any, *given: Any, **more: Any) -> Any:
        answer = finishing(self, *given, **more)
        seconds.append(time.perf_counter() - begun[0])
        return answer

    setattr(client, start, begin)
    setattr(client, finish, end)
    return seconds


def common(folder: Path) -> dict[str, Any]:
    """Return arguments that both configurations take."""
    return {
        "output_dir": str(folder / "trainer"),
        "max_steps": STEPS,
        "per_device_train_batch_size": EACH,
        "num_generations": EACH,
        "max_completion_length": TOKENS,
        "learning_rate": 1e-3 if GPU else 0.05,
        "use_cpu": not GPU,
        "bf16": GPU,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def adapters(lora: bool) -> LoraConfig | None:
    targets = ["q_proj", "o_proj", "down_proj"]
    return LoraConfig(r=4, lora_alpha=32, target_modules=targets) if lora else None


def dataset(prompts: list[Any]) -> Dataset:
    return Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="problems")


def save(model: Any, folder: Path) -> None:
    """Write down the weights that must be served."""
    tensors = {name: tensor.bfloat16().cpu() for name, tensor in merged_tensors(model).items()}
    save_file(tensors, folder / "model.safetensors")


def train(url: str, model: Path, folder: Path, lora: bool) -> int:
    """Train by `GRPOTrainer`; returns its steps."""
    tokenizer = AutoTokenizer.from_pretrained(EARLY)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=dataset([each.prompt for each in problems(STEPS * 2, seed=5)]),
        peft_config=adapters(lora),
        args=GRPOConfig(
            **common(folder),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            vllm_group_port=int(os.environ["GROUP_PORT"]),
            generation_kwargs={"allowed_token_ids": list(range(len(tokenizer)))},
        ),
    )
    trainer.train()
    # before TRL takes the adapters out again, which rounds the weights below
    save(trainer.accelerator.unwrap_model(trainer.model), folder)
    trainer.vllm_generation.sync_weights()
    return int(trainer.state.global_step)


class SaveBeforeSync(TrainerCallback):  # type: ignore[misc]
    """Writes the weights down at the end of the last step; TRL's own callback, which comes after it, sends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == STEPS:
            save(model, self.folder)


def train_async(url: str, model: Path, folder: Path, lora: bool) -> int:
    """Train by `AsyncGRPOTrainer`; returns its steps."""
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    tokenizer = AutoTokenizer.from_pretrained(EARLY)
    tokenizer.chat_template = qwen3_chat_template  # TRL parses answers of the templates that it knows
    asked = [[{"role": "user", "content": each.prompt}] for each in problems(STEPS * 2, seed=5)]
    trainer = AsyncGRPOTrainer(
        model=str(model),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=dataset(asked),
        peft_config=adapters(lora),
        callbacks=[SaveBeforeSync(folder)],
        # without a budget a row has as many samples as a batch
        args=AsyncGRPOConfig(**common(folder), vllm_server_base_url=url, token_budget=0),
    )
    trainer.train()
    return int(trainer.state.global_step)


def main(out: Path, url: str, key: str, model: Path, folder: Path, trainer: str, way: str) -> None:
    torch.manual_seed(0)
    if not GPU:
        without_gpu()
    if trainer == "grpo":
        run, module = train, vllm_client
        seconds = timed_updates(vllm_client.VLLMClient, "_start_weight_update", "_finish_weight_update")
    else:
        run, module = train_async, weight_transfer
        seconds = timed_updates(async_client.VLLMClient, "start_weight_update", "finish_weight_update")
    if way == "killed":
        kill_in_the_second_update(module)
    steps = run(url.replace("http://", f"http://x:{key}@"), model, folder, way == "lora")
    with Client(url, key) as weights:
        epoch = weights.verify().epoch
    out.write_text(json.dumps({"epoch": epoch, "steps": steps, "update seconds": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]), *sys.argv[6:])
