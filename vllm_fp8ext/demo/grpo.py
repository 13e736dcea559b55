# SPDX-License-Identifier: Apache-2.0
"""A trainer for the demo: GRPO on the tiny model, on a CPU, with the trainer kit's layers and corrections.

Source: DeepSeekMath, arXiv 2402.03300, without its KL penalty; ratios are clipped as PPO's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vllm_fp8ext.trainer.convert import convert
from vllm_fp8ext.trainer.correction import Correction
from vllm_fp8ext.trainer.kv_cache import Fp8KvAttention
from vllm_fp8ext.trainer.recipes import BlockScaling

CLIP = 0.2
"""Distance from 1, of new by old probability, at which a token's gradient ends."""
BETAS = (0.9, 0.95)
GRADIENT_NORM = 1.0
KV_ATTENTION = "fp8_kv"
"""Name of the attention of the latest policy that has an FP8 KV cache."""


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """Answers of a server to a batch of prompts, `group` to each in a row.

    Attributes:
        tokens: prompts and answers, `[answers, length]`, int64, padded on the right. All prompts have `prompt` tokens.
        server_logprobs: `[answers, length - prompt]`, FP32, of the answers' tokens.
        mask: the same shape, 1 for tokens that the server sampled.
        rewards: `[answers]`.
    """

    tokens: Tensor
    server_logprobs: Tensor
    mask: Tensor
    rewards: Tensor
    prompt: int
    group: int

    def advantages(self) -> Tensor:
        """Return rewards by the mean and deviation of their group, `[answers, 1]`; 0 where all are alike."""
        groups = self.rewards.view(-1, self.group)
        centred = groups - groups.mean(1, keepdim=True)
        return (centred / (groups.std(1, keepdim=True, correction=0) + 1e-4)).view(-1, 1)


class Policy:
    """The model that is trained: it computes in BF16, as a server does, and its masters are FP32."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        rate: float,
        recipe: BlockScaling | None = None,
        kv_attention: Fp8KvAttention | None = None,
    ) -> None:
        """Load a checkpoint.

        Args:
            rate: the optimizer's learning rate.
            recipe: of layers that compute as the server's; None for BF16.
            kv_attention: reads K and V as the server's FP8 KV cache has them; whoever pushes gives it the scales.
        """
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        if recipe is not None:
            convert(self.model, recipe)
        if kv_attention is not None:
            ALL_ATTENTION_FUNCTIONS.register(KV_ATTENTION, kv_attention)
            self.model.set_attn_implementation(KV_ATTENTION)
        self._weights = list(self.model.parameters())
        self._masters = [nn.Parameter(weight.detach().float()) for weight in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=rate, betas=BETAS, weight_decay=0.0)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a push sends: BF16 weights by name."""
        return {name: weight.detach() for name, weight in self.model.named_parameters()}

    def logprobs(self, rollout: SampledBatch) -> tuple[Tensor, Tensor]:
        """Return logprobs of the answers' tokens, and entropies of their distributions, in nats.

        Both are `[answers, length - prompt]`, FP32.
        """
        logits = self.model(rollout.tokens).logits[:, rollout.prompt - 1 : -1].float()
        scores = logits.log_softmax(-1)
        chosen = scores.gather(-1, rollout.tokens[:, rollout.prompt :, None])[..., 0]
        return chosen, -(scores.detach().exp() * scores.detach()).sum(-1)

    def update(
        self, rollout: SampledBatch, before: Tensor | None = None, correction: Correction | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take one optimizer step; returns logprobs and entropies from before it, as `logprobs` does.

        Args:
            before: logprobs of the policy as it was when the server had its weights, `[answers, length - prompt]`; None where
                it is that policy.
            correction: weights of tokens for the difference between trainer and server; None for none.

        Raises:
            ValueError: logprobs that are not numbers.
        """
        logprobs, entropy = self.logprobs(rollout)
        sampled = logprobs.detach() if before is None else before
        ratios, advantages = (logprobs - sampled).exp(), rollout.advantages()
        gain = torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
        if correction is not None:
            gain = gain * correction.weights(sampled, rollout.server_logprobs, rollout.mask)
        loss = -(gain * rollout.mask).sum() / rollout.mask.sum()
        if not loss.isfinite():
            raise ValueError(f"loss: expected a number, found {loss.item()}")
        loss.backward()
        self._step()
        return logprobs.detach(), entropy

    def _step(self) -> None:
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        nn.utils.clip_grad_norm_(self._masters, GRADIENT_NORM)
        self._optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self._masters, self._weights, strict=True):
                weight.copy_(master)
