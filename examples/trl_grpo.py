# SPDX-License-Identifier: Apache-2.0
"""TRL trains the tiny model that adds numbers, on a CPU, by answers of a server that takes its weights after each step.

    fp8ext serve EARLY --logprobs-mode processed_logprobs   # docs/quickstart.md says where EARLY is, and what CPUs need
    python examples/trl_grpo.py http://127.0.0.1:8000       # where TRL and this package are installed

The admin key comes from FP8EXT_ADMIN_KEY.
"""

import os
import sys
import tempfile
from typing import Any

from datasets import Dataset
from datasets.table import InMemoryTable
from trl import GRPOConfig, GRPOTrainer

from vllm_fp8ext.checkpoints import EARLY, problems
from vllm_fp8ext.serve.adapters.trl import use_client
from vllm_fp8ext.serve.client import Client

STEPS = 2


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Reward 1 for each completion that begins with the answer."""
    return [float(text.startswith(sum_)) for text, sum_ in zip(completions, answer, strict=True)]


def main(url: str, key: str) -> None:
    """Train for a few steps, and print which weights the server has then."""
    sums = problems(8, seed=5)
    columns = {"prompt": [each.prompt for each in sums], "answer": [each.answer for each in sums]}
    with use_client(url, key), tempfile.TemporaryDirectory() as folder:  # transport="ipc" on the server's GPU
        trainer = GRPOTrainer(
            str(EARLY),
            reward_funcs=right,
            train_dataset=Dataset(InMemoryTable.from_pydict(columns), fingerprint="sums"),
            args=GRPOConfig(
                folder,
                use_vllm=True,
                vllm_mode="server",
                max_steps=STEPS,
                num_generations=4,
                per_device_train_batch_size=4,
                max_completion_length=6,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
            ),
        )
        trainer.train()
    with Client(url, key) as client:
        weights = client.weights()
        print(f"epoch {weights.epoch} is served, version {weights.version}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"expected the URL of a server, found {sys.argv[1:]}")
    main(sys.argv[1], os.environ["FP8EXT_ADMIN_KEY"])
