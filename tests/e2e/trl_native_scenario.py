# SPDX-License-Identifier: Apache-2.0
"""TRL in server mode on a CPU, in one of three ways. Writes what it saw, as JSON, to a file.

`client`: TRL's generation client alone, by vLLM's weight transfer. `native`: its `GRPOTrainer` with that client. `adapter`:
its `GRPOTrainer` with `serve.adapters.trl`; with `lora` after it, of adapters that TRL merges. What the machine lacks is
replaced: NCCL by Gloo.
"""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from gloo_trainer import open_trainer_endpoint, packed_broadcast_producer
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client

from vllm_fp8ext.checkpoints import EARLY, LATE, problems
from vllm_fp8ext.serve.adapters.trl import use_client
from vllm_fp8ext.serve.client import Client

STEPS, EACH, TOKENS = 3, 4, 6


def without_nccl() -> None:
    """Put Gloo in place of what needs a GPU: the group, its broadcasts, and the device that TRL asks for."""
    vllm_client.open_trainer_endpoint = open_trainer_endpoint
    vllm_client.packed_nccl_broadcast_producer = packed_broadcast_producer
    original = vllm_client.VLLMClient.init_communicator
    vllm_client.VLLMClient.init_communicator = lambda self, device=0: original(self, device="cuda")


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """How much of an answer is right."""
    return [
        sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
        for text, right in zip(completions, answer, strict=True)
    ]


def trained(url: str, folder: Path, lora: bool) -> GRPOTrainer:
    asked = problems(STEPS * 2, seed=5)
    columns = {"prompt": [found.prompt for found in asked], "answer": [found.answer for found in asked]}
    adapters = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "o_proj", "down_proj"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(EARLY, dtype=torch.bfloat16),
        processing_class=AutoTokenizer.from_pretrained(EARLY),
        reward_funcs=reward,
        train_dataset=Dataset(InMemoryTable.from_pydict(columns), fingerprint="problems"),
        peft_config=adapters if lora else None,
        args=GRPOConfig(
            output_dir=str(folder / "trainer"),
            max_steps=STEPS,
            per_device_train_batch_size=EACH,
            num_generations=EACH,
            max_completion_length=TOKENS,
            learning_rate=0.05,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            vllm_group_port=int(os.environ["GROUP_PORT"]),
        ),
    )
    trainer.train()
    # before TRL takes the adapters out again, which rounds the weights below
    save(trainer.accelerator.unwrap_model(trainer.model), folder)
    trainer.vllm_generation.sync_weights()
    return trainer


def save(model: Any, folder: Path) -> None:
    """Write down the weights that must be served."""
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    tensors = model.state_dict()
    tensors.pop("lm_head.weight", None)  # the model shares its embedding
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def main(out: Path, url: str, key: str, folder: Path, way: str, more: str = "") -> None:
    torch.manual_seed(0)
    keyed = url.replace("http://", f"http://x:{key}@")
    facts: dict[str, Any] = {}
    if way == "client":
        without_nccl()
        client = vllm_client.VLLMClient(base_url=keyed, group_port=int(os.environ["GROUP_PORT"]))
        facts["model"] = client.get_server_info()["model_config"]["dtype"]
        client.init_communicator(device="cuda")
        model = AutoModelForCausalLM.from_pretrained(LATE, dtype=torch.bfloat16)
        client.update_model_params(model)
        client.reset_prefix_cache()
        asked = problems(4, seed=3)
        told = client.generate([found.prompt for found in asked], temperature=0.0, max_tokens=TOKENS, n=1)
        facts["tokens"] = [len(ids) for ids in told["completion_ids"]]
        with client.weight_update():
            for name, tensor in model.named_parameters():
                client.update_named_param(name, tensor.data)
        save(model, folder)
    elif way == "native":
        without_nccl()
        trainer = trained(keyed, folder, lora=False)
        facts["steps"] = trainer.state.global_step
    else:
        with use_client(url, key):
            trainer = trained(url, folder, lora=more == "lora")
        facts["steps"] = trainer.state.global_step
    with Client(url, key) as weights:
        facts["epoch"] = weights.verify().epoch
        facts["digests"] = weights.digests().digests
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
