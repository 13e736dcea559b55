# SPDX-License-Identifier: Apache-2.0
"""The trained tiny model in FP8 against BF16, and the served log-probabilities against the reference numerics."""

import math
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_fp8ext.checkpoints import EARLY, LATE, problems
from vllm_fp8ext.demo.server import MODEL, Server
from vllm_fp8ext.kernels.numerics import reference

PROBLEMS = problems(60, seed=11)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Whole problems as token ids: prompt, answer, end."""
    tokenizer = AutoTokenizer.from_pretrained(LATE)
    return [
        [*tokenizer(problem.prompt + problem.answer)["input_ids"], tokenizer.eos_token_id]
        for problem in PROBLEMS
    ]


def _model(checkpoint: Any) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()


def _in_fp8(model: nn.Module) -> nn.Module:
    """The model with every projection in the reference numerics."""

    class Linear(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.codes, self.scales = reference.quantize_weight(weight)

        def forward(self, x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            out = reference.gemm(*reference.quantize_activation(rows), self.codes, self.scales)
            return out.to(x.dtype).view(*x.shape[:-1], -1)

    for path, module in list(model.named_modules()):
        if path.endswith("_proj"):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Linear(module.weight.data))
    return model


def _logprobs(model: nn.Module, texts: list[list[int]]) -> Tensor:
    """Log-probabilities of every next token, `[tokens, vocabulary]`."""
    with torch.inference_mode():
        logits = model(torch.tensor(texts)).logits.float()
    return torch.log_softmax(logits[:, :-1], -1).reshape(-1, logits.shape[-1])


def _served(server: Server, texts: list[list[int]]) -> Tensor:
    """The same from the server: full distributions over the prompt."""
    body = {"model": MODEL, "prompt": texts, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 128}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=580).raise_for_status().json()
    rows = []
    for choice in reply["choices"]:
        for position in choice["prompt_logprobs"][1:]:
            row = torch.full((128,), -math.inf)
            for token, entry in position.items():
                row[int(token)] = entry["logprob"]
            rows.append(row)
    return torch.stack(rows)


def _divergence(expected: Tensor, actual: Tensor) -> float:
    """Mean Kullback-Leibler divergence, in nats per token."""
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


@pytest.mark.parametrize("checkpoint", [EARLY, LATE], ids=["early", "late"])
def test_fp8_stays_close_to_bf16(single: Server, texts, checkpoint):
    with single.client() as client:
        client.push(checkpoint, version=checkpoint.name)
    plain, served = _logprobs(_model(checkpoint), texts), _served(single, texts)
    labels = torch.tensor([token for text in texts for token in text[1:]])
    perplexity = [math.exp(-rows[range(len(labels)), labels].mean()) for rows in (plain, served)]
    divergence = _divergence(plain, served)
    # digits of a prompt are random: there is no greedy choice to agree on, so the answers are compared
    answered = torch.arange(len(labels)) % (len(texts[0]) - 1) >= len(PROBLEMS[0].prompt) - 1
    agreement = float((plain.argmax(-1) == served.argmax(-1))[answered].float().mean())
    ratio = perplexity[1] / perplexity[0]
    print(
        f"{checkpoint.name}: perplexity ratio {ratio:.5f}, KL {divergence:.6f}, greedy agreement {agreement:.4f}"
    )
    assert perplexity[1] / perplexity[0] <= 1.01
    assert divergence <= 0.003
    # the early one is right on a quarter of the problems: many of its choices are ties, which any rounding tips
    assert agreement >= (0.97 if checkpoint is LATE else 0.9)


def test_served_logprobs_are_those_of_the_fp8_model(single: Server, texts):
    """Closer to the reference numerics than to BF16 by a wide margin, which only noise of BF16 activations separates."""
    with single.client() as client:
        client.push(EARLY, version="early")
    served = _served(single, texts)
    to_reference = _divergence(_logprobs(_in_fp8(_model(EARLY)), texts), served)
    to_bf16 = _divergence(_logprobs(_model(EARLY), texts), served)
    print(f"KL to the FP8 reference {to_reference:.6f}, to BF16 {to_bf16:.6f}")
    assert to_reference < 0.4 * to_bf16
