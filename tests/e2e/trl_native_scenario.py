# SPDX-License-Identifier: Apache-2.0
"""TRL in server mode on a CPU, in one of three ways. Writes what it saw, as JSON, to a file.

`client`: TRL's generation client alone, by vLLM's weight transfer. `native`: its `GRPOTrainer` with that client. `adapter`:
its `GRPOTrainer` with `serve.adapters.trl`; with `lora` after it, of adapters that TRL merges. What the machine lacks is
replaced: NCCL by Gloo.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from gloo_trainer import open_trainer_endpoint, packed_broadcast_producer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.generation import vllm_client
from trl_training import TOKENS, merged_tensors, new_trainer

from vllm_fp8ext.checkpoints import LATE, problems
from vllm_fp8ext.serve.adapters.trl import use_client
from vllm_fp8ext.serve.client import Client


def without_nccl() -> None:
    """Put Gloo in place of what needs a GPU: the group, its broadcasts, and the device that TRL asks for."""
    vllm_client.open_trainer_endpoint = open_trainer_endpoint
    vllm_client.packed_nccl_broadcast_producer = packed_broadcast_producer
    original = vllm_client.VLLMClient.init_communicator
    vllm_client.VLLMClient.init_communicator = lambda self, device=0: original(self, device="cuda")


def trained(url: str, folder: Path, lora: bool) -> GRPOTrainer:
    server = {"vllm_server_base_url": url, "vllm_group_port": int(os.environ["GROUP_PORT"])}
    trainer = new_trainer(folder, lora=lora, use_vllm=True, vllm_mode="server", **server)
    trainer.train()
    # before TRL takes the adapters out again, which rounds the weights below
    save(trainer.accelerator.unwrap_model(trainer.model), folder)
    trainer.vllm_generation.sync_weights()
    return trainer


def save(model: Any, folder: Path) -> None:
    """Write down the weights that must be served."""
    save_file(merged_tensors(model), folder / "model.safetensors")


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
        prompts = [each.prompt for each in problems(4, seed=3)]
        answers = client.generate(prompts, temperature=0.0, max_tokens=TOKENS, n=1)
        facts["tokens"] = [len(ids) for ids in answers["completion_ids"]]
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
