# SPDX-License-Identifier: Apache-2.0
"""The adapter on one of several processes of accelerate, with Gloo. Writes its batch and what it logs, as JSON, to a file."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator

from vllm_fp8ext.trainer.trl_adapter import use_correction

LENGTHS = (5, 0, 2)
"""Tokens that count in each process's sequence."""


def output(rank: int) -> dict[str, torch.Tensor]:
    """What TRL's method returns in a process: one sequence of 5 tokens."""
    server = -3 * torch.rand(1, 5, generator=torch.Generator().manual_seed(rank)) - 1
    noise = torch.randn(1, 5, generator=torch.Generator().manual_seed(rank + 10)) / 2
    mask = (torch.arange(5) < LENGTHS[rank]).long()[None]
    return {
        "old_per_token_logps": server + noise,
        "sampling_per_token_logps": server,
        "completion_mask": mask,
    }


def main(out: Path) -> None:
    accelerator = Accelerator(cpu=True)
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        loss_type="dapo",
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _generate_and_score_completions=lambda _: output(accelerator.process_index),
    )
    use_correction(trainer)
    trainer._generate_and_score_completions([])
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    batch = {name: tensor.tolist() for name, tensor in output(accelerator.process_index).items()}
    out.write_text(json.dumps({"logged": logged, **batch}))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
