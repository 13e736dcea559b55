# SPDX-License-Identifier: Apache-2.0
"""TRL trains adapters by GRPO on answers of a server, which is pushed the merged weights before each step and after the last.
Takes a file, to which it writes what it saw, as JSON, the server's URL and key, and a folder for the merged weights.

The tensors come from TRL's own generator: it merges the adapters, yields the model's parameters, and takes the adapters out
again."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import httpx
import torch
from safetensors.torch import save_file
from trl import GRPOTrainer
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration
from trl_training import TOKENS, merged_tensors, new_trainer

from vllm_fp8ext.demo.server import MODEL
from vllm_fp8ext.serve.client import Client


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
        answers: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 1.0}
            body |= {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
            reply = (
                httpx.post(f"{self._url}/v1/completions", json=body, timeout=120).raise_for_status().json()
            )
            [choice] = reply["choices"]
            answers["prompt_ids"].append(choice["prompt_token_ids"])
            answers["completion_ids"].append(choice["token_ids"])
            answers["logprobs"].append(choice["logprobs"]["token_logprobs"])
            self.answered_by += [span["version"] for span in choice["weight_versions"]]
        return answers

    def push(self, trainer: GRPOTrainer) -> None:
        """Push the merged weights as TRL makes them; what they must be is written to a file before."""
        version = f"step-{len(self.pushes)}"
        model = trainer.accelerator.unwrap_model(trainer.model)
        save_file(merged_tensors(model), self._folder / f"{version}.safetensors")
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


def main(out: Path, url: str, key: str, folder: Path) -> None:
    torch.manual_seed(0)
    with Client(url, key) as client:
        rollouts = Rollouts(client, url, folder)
        trainer = new_trainer(folder, lora=True, rollout_func=rollouts)
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
