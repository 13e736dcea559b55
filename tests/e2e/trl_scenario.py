# SPDX-License-Identifier: Apache-2.0
"""TRL trains adapters by GRPO on answers of a server, which is pushed the merged weights before each step and after the last.
Takes a file, to which it writes what it saw, as JSON, the server's URL and key, and a folder for the merged weights.

The tensors come from TRL's own generator: it merges the adapters, yields the model's parameters, and takes the adapters out
again."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from vllm_fp8ext.checkpoints import EARLY, problems
from vllm_fp8ext.demo.server import MODEL
from vllm_fp8ext.serve.client import Client

STEPS, EACH, TOKENS = 3, 4, 6
"""Steps of training, answers to a prompt, tokens of an answer."""


class Rollouts:
    """What TRL calls for answers: weights are pushed first, then the server is asked."""

    def __init__(self, client: Client, url: str, folder: Path) -> None:
        self.pushes: list[dict[str, Any]] = []
        self.answered_by: list[str] = []
        self._client = client
        self._url = url
        self._folder = folder

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        self.push(trainer)
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 1.0}
            body |= {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
            reply = (
                httpx.post(f"{self._url}/v1/completions", json=body, timeout=120).raise_for_status().json()
            )
            [choice] = reply["choices"]
            found["prompt_ids"].append(choice["prompt_token_ids"])
            found["completion_ids"].append(choice["token_ids"])
            found["logprobs"].append(choice["logprobs"]["token_logprobs"])
            self.answered_by += [span["version"] for span in choice["weight_versions"]]
        return found

    def push(self, trainer: GRPOTrainer) -> None:
        """Push the merged weights as TRL makes them; what they must be is written to a file before."""
        version = f"step-{len(self.pushes)}"
        model = trainer.accelerator.unwrap_model(trainer.model)
        merged = copy.deepcopy(model).merge_and_unload().state_dict()
        merged.pop("lm_head.weight")  # the model shares its embedding
        save_file(
            {name: tensor.contiguous() for name, tensor in merged.items()},
            self._folder / f"{version}.safetensors",
        )
        before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "base_layer" in name}
        update = self._client.push(named_params(trainer, model), version=version, chunk_bytes=1 << 20)
        after = model.state_dict()
        self.pushes.append(
            {
                "epoch": (update.result or {})["epoch"],
                "version": version,
                "digests": self._client.digests().digests,
                "verified": self._client.verify().version,
                "taken out again": all(
                    torch.allclose(tensor, after[name], atol=1e-2) for name, tensor in before.items()
                ),
            }
        )


def named_params(trainer: GRPOTrainer, model: Any) -> Any:
    """TRL's generator of parameters under the names that vLLM expects, without a vLLM of TRL's."""
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model, generation.accelerator = model, trainer.accelerator
    generation._dist = DistributedBackend(trainer.accelerator)
    return generation._iter_named_params()


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """How much of an answer is right."""
    return [
        sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
        for text, right in zip(completions, answer, strict=True)
    ]


def main(out: Path, url: str, key: str, folder: Path) -> None:
    torch.manual_seed(0)
    asked = problems(STEPS * 2, seed=5)
    columns = {"prompt": [found.prompt for found in asked], "answer": [found.answer for found in asked]}
    data = Dataset(InMemoryTable.from_pydict(columns), fingerprint="problems")
    with Client(url, key) as client:
        rollouts = Rollouts(client, url, folder)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(EARLY, dtype=torch.bfloat16),
            processing_class=AutoTokenizer.from_pretrained(EARLY),
            reward_funcs=reward,
            train_dataset=data,
            rollout_func=rollouts,
            peft_config=LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "o_proj", "down_proj"]),
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
            ),
        )
        trainer.train()
        rollouts.push(trainer)
    facts = {
        "pushes": rollouts.pushes,
        "answered by": rollouts.answered_by,
        "steps": trainer.state.global_step,
    }
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
