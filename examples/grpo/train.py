# SPDX-License-Identifier: Apache-2.0
"""GRPO on the answers of a blockfp8 server: the loop of a trainer that uses the trainer kit, and nothing else.

    python examples/grpo/train.py http://127.0.0.1:8000

The server has the tiny model that adds numbers. Its admin key comes from FP8EXT_ADMIN_KEY. README.md explains the parts.
"""

import argparse
import os
import random
from dataclasses import dataclass
from typing import Any

import torch
from openai import OpenAI
from torch import Tensor
from transformers import AutoModelForCausalLM

from vllm_fp8ext.checkpoints import EARLY, AdditionProblem, held_out
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.trainer.convert import convert
from vllm_fp8ext.trainer.correction import token_tis
from vllm_fp8ext.trainer.mismatch import log_mismatch
from vllm_fp8ext.trainer.recipes import BlockScaling

PROMPTS, GROUP = 16, 8
"""Prompts of a step, and answers to each."""
MAX_TOKENS = 8
RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Answers of the server, `GROUP` to each prompt in a row. All prompts have `start` tokens."""

    tokens: Tensor
    """Prompts and answers, `[answers, length]`, padded on the right."""
    start: int
    server_logprobs: Tensor
    """The server's logprobs of the answers' tokens, FP32, `[answers, length - start]`."""
    mask: Tensor
    """1 for tokens of answers, 0 for padding, of that shape."""
    rewards: Tensor
    """`[answers]`."""


def draw_problems() -> list[AdditionProblem]:
    """Draw the problems of a step, none of those that the model is tested with."""
    drawn: list[AdditionProblem] = []
    while len(drawn) < PROMPTS:
        a, b = random.randrange(1000), random.randrange(1000)
        if not held_out(a, b):
            drawn.append(AdditionProblem(a, b))
    return drawn


def sample(api: OpenAI, model: str, problems: list[AdditionProblem]) -> Rollout:
    """Ask for answers at temperature 1, with the tokens and the logprobs that the server sampled by."""
    reply = api.completions.create(
        model=model,
        prompt=[problem.prompt for problem in problems],
        n=GROUP,
        max_tokens=MAX_TOKENS,
        temperature=1.0,
        logprobs=0,
        extra_body={"return_token_ids": True},
    )
    choices: list[Any] = sorted(reply.choices, key=lambda choice: choice.index)
    prompts = [choice.prompt_token_ids for choice in choices]
    answers = [choice.token_ids for choice in choices]
    longest = max(map(len, answers))
    right = [choice.text == problems[choice.index // GROUP].answer for choice in choices]

    def padded(rows: list[list[float]]) -> Tensor:
        return torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in rows])

    return Rollout(
        tokens=torch.cat([torch.tensor(prompts), padded(answers).long()], dim=1),
        start=len(prompts[0]),
        server_logprobs=padded([choice.logprobs.token_logprobs for choice in choices]),
        mask=padded([[1.0] * len(answer) for answer in answers]),
        rewards=torch.tensor(right).float(),
    )


def advantages(rewards: Tensor) -> Tensor:
    """Return how far each reward is above the mean of its group, in standard deviations, `[answers, 1]`."""
    groups = rewards.view(-1, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True, correction=0) + 1e-4)).view(-1, 1)


def logprobs_of(model: torch.nn.Module, rollout: Rollout) -> Tensor:
    """Return the trainer's logprobs of the answers' tokens, FP32 `[answers, length - start]`."""
    with torch.autocast(rollout.tokens.device.type, torch.bfloat16):
        logits = model(rollout.tokens).logits[:, rollout.start - 1 : -1]
    chosen = rollout.tokens[:, rollout.start :, None]
    return logits.float().log_softmax(-1).gather(-1, chosen)[..., 0]


def main(url: str, key: str, steps: int) -> None:
    """Train from `EARLY`, and print each step's reward and mismatch."""
    model = AutoModelForCausalLM.from_pretrained(EARLY, dtype=torch.float32)  # masters; layers round to BF16
    convert(model, BlockScaling())  # linear layers multiply what the server serves
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)

    def tensors() -> dict[str, Tensor]:
        return {name: weight.detach().bfloat16() for name, weight in model.named_parameters()}

    with Client(url, key) as client, OpenAI(base_url=f"{url}/v1", api_key="none") as api:
        served = api.models.list().data[0].id
        client.push(tensors(), version="start")
        for step in range(1, steps + 1):
            rollout = sample(api, served, draw_problems())
            logprobs = logprobs_of(model, rollout)
            before = logprobs.detach()
            weights = token_tis(before, rollout.server_logprobs, rollout.mask)
            gain = weights * advantages(rollout.rewards) * logprobs  # one update a rollout: no ratios to clip
            loss = -(gain * rollout.mask).sum() / rollout.mask.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            client.push(tensors(), version=f"step-{step}")
            mismatch = log_mismatch(before, rollout.server_logprobs, rollout.mask)
            print(
                f"step {step}: reward {rollout.rewards.mean():.3f}, "
                f"mismatch KL {mismatch['mismatch/kl_k3']:.1e}, "
                f"effective sample size {mismatch['mismatch/effective_sample_size']:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the tiny model by GRPO through a blockfp8 server.")
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    main(options.url, os.environ["FP8EXT_ADMIN_KEY"], options.steps)
