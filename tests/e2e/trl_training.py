# SPDX-License-Identifier: Apache-2.0
"""A `GRPOTrainer` of TRL on a CPU, for the scenarios that train by it."""

import copy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from vllm_fp8ext.checkpoints import EARLY, problems

STEPS, EACH, TOKENS = 3, 4, 6
"""Steps of training, answers to a prompt, tokens of an answer."""


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """How much of an answer is right."""
    return [
        sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
        for text, right in zip(completions, answer, strict=True)
    ]


def new_trainer(folder: Path, *, lora: bool, rollout_func: Any = None, **config: Any) -> GRPOTrainer:
    """Return a trainer of the early checkpoint. `config`: more arguments of its `GRPOConfig`."""
    sums = problems(STEPS * 2, seed=5)
    columns = {"prompt": [each.prompt for each in sums], "answer": [each.answer for each in sums]}
    adapters = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "o_proj", "down_proj"])
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(EARLY, dtype=torch.bfloat16),
        processing_class=AutoTokenizer.from_pretrained(EARLY),
        reward_funcs=reward,
        train_dataset=Dataset(InMemoryTable.from_pydict(columns), fingerprint="problems"),
        rollout_func=rollout_func,
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
            **config,
        ),
    )


def merged_tensors(model: Any) -> dict[str, Tensor]:
    """Return the weights that must be served, adapters merged."""
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    tensors = model.state_dict()
    tensors.pop("lm_head.weight", None)  # the model shares its embedding
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
