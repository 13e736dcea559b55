# SPDX-License-Identifier: Apache-2.0
"""TRL's own GRPOTrainer with logprobs of a server that are given. Writes TRL's numbers and the adapter's, as JSON, to a file.

The trainer is made without vLLM, since that asks a server, and told afterwards that its completions come from one. A
`rollout_func` returns them. TRL then computes its importance weights, its loss and its gradient by itself.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.trainer.correction import ICEPOP, Correction
from vllm_fp8ext.trainer.trl_adapter import use_correction

MODES = {
    "token_truncate": Correction(low=0.5, high=2.0),
    "token_mask": Correction(outside="mask", low=0.5, high=2.0),
    "sequence_truncate": Correction(level="sequence", low=0.5, high=2.0),
    "sequence_mask": Correction(level="sequence", outside="mask", low=0.5, high=2.0),
}
"""TRL's modes with bounds 0.5 and 2, and the same rules here."""
PROMPTS, EACH, LENGTHS = ["1+2=", "3+4="], 2, (6, 4, 5, 6)


class Rollout:
    """Completions with the logprobs of a server that is not quite the trainer."""

    def __init__(self, trainer_logprobs: list[list[float]], *, unscored: bool) -> None:
        noise = torch.randn(len(LENGTHS), max(LENGTHS), generator=torch.Generator().manual_seed(3)) * 0.6
        self.logprobs: list[list[float | None]] = [
            [min(0.0, logprob + shift) for logprob, shift in zip(row, shifts, strict=False)]
            for row, shifts in zip(trainer_logprobs, noise.tolist(), strict=True)
        ]
        if unscored:
            self.logprobs[1][2] = None
        self.spans = [[self.span(1, 0, 2), self.span(2, 2, length)] for length in LENGTHS]

    @staticmethod
    def span(epoch: int, start: int, end: int) -> dict[str, Any]:
        return {"version": f"step-{epoch}", "epoch": epoch, "instance": "a", "start": start, "end": end}


def completion_ids() -> list[list[int]]:
    ids = torch.randint(5, 15, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(2))
    return [row[:length] for row, length in zip(ids.tolist(), LENGTHS, strict=True)]


def new_trainer(folder: Path) -> GRPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(EARLY)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(EARLY, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(index) for index in range(len(completions))],
        train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": PROMPTS}), fingerprint="prompts"),
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=len(LENGTHS),
            num_generations=EACH,
            use_cpu=True,
            bf16=False,
            report_to=[],
            vllm_importance_sampling_clip_min=0.5,
            vllm_importance_sampling_clip_max=2.0,
        ),
    )
    trainer.use_vllm, trainer._last_loaded_step = True, 0
    information = {"model_config": {"logprobs_mode": "processed_logprobs"}}
    client = SimpleNamespace(get_server_info=lambda: information)
    trainer.vllm_generation = SimpleNamespace(vllm_client=client, sync_weights=lambda: None)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def step(trainer: GRPOTrainer, rollout: Rollout) -> dict[str, Any]:
    """Return what TRL computes of a rollout: weights, loss, gradient's norm, and what it logs."""
    ids = trainer.processing_class(PROMPTS, add_special_tokens=False)["input_ids"]
    trainer.rollout_func = lambda prompts, _: {
        "prompt_ids": [ids[index // EACH] for index in range(len(LENGTHS))],
        "completion_ids": completion_ids(),
        "logprobs": rollout.logprobs,
        "weight_versions": rollout.spans,
    }
    trainer._metrics["train"].clear()
    inputs = [{"prompt": prompt} for prompt in PROMPTS for _ in range(EACH)]
    batch = trainer._generate_and_score_completions(inputs)
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    gradient = torch.cat(
        [each.grad.flatten() for each in trainer.model.parameters() if each.grad is not None]
    )
    return {
        "weights": batch["importance_sampling_ratio"].tolist(),
        "trainer": batch["old_per_token_logps"].tolist(),
        "server": [
            [None if math.isnan(each) else each for each in row]
            for row in batch["sampling_per_token_logps"].tolist()
        ],
        "mask": batch["completion_mask"].tolist(),
        "loss": loss.item(),
        "gradient": gradient.norm().item(),
        "metrics": {name: values[-1] for name, values in trainer._metrics["train"].items()},
    }


def main(out: Path, folder: Path) -> None:
    torch.manual_seed(0)
    trainer = new_trainer(folder)
    blank = Rollout([[-2.0] * length for length in LENGTHS], unscored=False)
    logprobs = step(trainer, blank)["trainer"]
    trainer_logprobs = [row[:length] for row, length in zip(logprobs, LENGTHS, strict=True)]
    facts: dict[str, Any] = {}
    original = trainer._generate_and_score_completions
    for unscored in (False, True):
        rollout = Rollout(trainer_logprobs, unscored=unscored)
        for mode, correction in MODES.items():
            trainer.vllm_importance_sampling_mode = mode
            own = step(trainer, rollout)
            trainer.vllm_importance_sampling_mode = (
                "token_truncate" if mode != "token_truncate" else "sequence_mask"
            )
            use_correction(trainer, correction)
            facts[f"{mode}{'-unscored' * unscored}"] = {"trl": own, "adapter": step(trainer, rollout)}
            trainer._generate_and_score_completions = original
    use_correction(trainer, ICEPOP)
    facts["icepop"] = step(trainer, rollout)
    try:
        use_correction(trainer)
    except ValueError as error:
        facts["twice"] = str(error)
    trainer.mask_truncated_completions = True
    facts["all_masked"] = step(trainer, rollout)
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
