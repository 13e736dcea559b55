# SPDX-License-Identifier: Apache-2.0
"""A correction of this package in TRL's GRPO loss. Imports no TRL: it works on a trainer that is there.

trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_importance_sampling_correction=True))
use_correction(trainer, ICEPOP)
trainer.train()

TRL 1.16 multiplies each token's loss by `inputs["importance_sampling_ratio"]`, which `_generate_and_score_completions`
computes. The adapter puts its own weights there. TRL's modes are the same rules: `token_truncate` is
`Correction(high=clip_max)`, `token_mask` has `outside="mask"`, `sequence_*` have `level="sequence"`, and `low` is `clip_min`.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.trainer.correction import Correction
from vllm_fp8ext.trainer.mismatch import PREFIX, TOKEN_TIS, WARN_KL, Mismatch, log_mismatch

RATIO = "importance_sampling_ratio"
UNSCORED = f"{PREFIX}unscored_share"
"""Share of tokens to which the server gave no logprob: TRL has NaN there. They weigh 1 and are not measured."""


def use_correction(trainer: Any, correction: Correction = TOKEN_TIS, *, warn_kl: float = WARN_KL) -> None:
    """Make a `GRPOTrainer` weigh its tokens by `correction`, and log the mismatch.

    TRL's own mode has no effect on the loss then, and `sampling/importance_sampling_ratio` in its logs still is of that mode.
    The measures of `log_mismatch` appear in TRL's logs. Those over all tokens are gathered from all processes; those by
    position and by weight version are of the main process. Versions need a `rollout_func` that returns `weight_versions`,
    the spans of each completion.

    A batch in which no token counts is left as it is, since its loss is 0.

    Raises:
        ValueError: The trainer does not ask vLLM or does not correct; its loss takes only weights of tokens; it is corrected
            already. Later, in a step: logprobs or spans that `log_mismatch` refuses.
    """
    for name in ("use_vllm", "vllm_importance_sampling_correction"):
        if not getattr(trainer, name, False):
            raise ValueError(
                f"trainer: expected {name}=True in its GRPOConfig, found {getattr(trainer, name, None)!r}"
            )
    if trainer.loss_type == "vespo" and correction.level != "token":
        raise ValueError(f"level: expected 'token' with TRL's loss 'vespo', found {correction.level!r}")
    original = trainer._generate_and_score_completions
    if hasattr(original, "correction"):
        raise ValueError(f"trainer: expected one without a correction, found {original.correction}")

    @functools.wraps(original)
    def generate_and_score(inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = original(inputs)
        batch = _TrlBatch(output)
        output[RATIO] = batch.weights(correction)
        for name, value in batch.measures(trainer.accelerator, inputs, correction, warn_kl).items():
            trainer._metrics["train" if trainer.model.training else "eval"][name].append(value)
        return output

    generate_and_score.correction = correction  # type: ignore[attr-defined]
    trainer._generate_and_score_completions = generate_and_score


class _TrlBatch:
    """Logprobs and mask of what TRL's `_generate_and_score_completions` returned, `[batch, tokens]` each."""

    def __init__(self, output: dict[str, Any]) -> None:
        self._trainer, self._server = output["old_per_token_logps"], output["sampling_per_token_logps"]
        mask: Tensor = output["completion_mask"]
        mask = mask * output["tool_mask"] if "tool_mask" in output else mask
        self._unscored = torch.isnan(self._server) & (mask != 0)
        self._mask = (mask != 0) & ~self._unscored
        unscored, self._tokens = torch.stack([self._unscored.sum(), self._mask.sum()]).tolist()
        self._unscored_share = unscored / max(1, unscored + self._tokens)

    def weights(self, correction: Correction) -> Tensor:
        """Return the weights in TRL's shape, and 1 for what the correction does not see."""
        if not self._tokens:
            return torch.ones_like(self._trainer)
        weights = correction.weights(self._trainer, self._server, self._mask)
        seen = self._mask if correction.level == "token" else self._mask.any(-1, keepdim=True)
        return torch.where(seen, weights, torch.ones_like(weights))

    def measures(
        self, accelerator: Any, inputs: Sequence[Mapping[str, Any]], correction: Correction, warn_kl: float
    ) -> dict[str, float]:
        """Return the measures of this batch. All processes call it, also those in which no token counts."""
        values: dict[str, float] = {}
        if self._tokens:
            spans = [row["weight_versions"] for row in inputs if "weight_versions" in row]
            values = log_mismatch(
                self._trainer,
                self._server,
                self._mask,
                weight_versions=spans or None,
                correction=correction,
                warn_kl=warn_kl,
            )
        values[UNSCORED] = self._unscored_share
        return values | self._gathered(accelerator, values)

    def _gathered(self, accelerator: Any, values: dict[str, float]) -> dict[str, float]:
        """Combine the measures over all tokens of all processes, means weighted by tokens."""
        names = [PREFIX + name for name in Mismatch.__dataclass_fields__] + [UNSCORED]
        local = torch.tensor([[values.get(name, math.nan) for name in names]], dtype=torch.float32)
        columns = accelerator.gather(local.to(accelerator.device)).double().unbind(-1)
        tokens = columns[names.index(f"{PREFIX}tokens")].nan_to_num(nan=0.0)
        combined = {}
        for name, column in zip(names, columns, strict=True):
            if name == f"{PREFIX}largest_ratio":
                total = column.nan_to_num(nan=-math.inf, posinf=math.inf).max()
            elif name == f"{PREFIX}tokens":
                total = tokens.sum()
            elif name == UNSCORED:
                total = column.mean()
            else:
                total = (column.nan_to_num(nan=0.0, posinf=math.inf) * tokens).sum() / tokens.sum()
            combined[name] = total.item()
        return combined if tokens.sum() else {UNSCORED: combined[UNSCORED]}
