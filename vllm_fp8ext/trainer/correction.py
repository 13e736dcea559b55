# SPDX-License-Identifier: Apache-2.0
"""Importance weights that correct a policy gradient for the difference between server and trainer.

The server samples tokens by its policy `π_server`, in FP8. The trainer takes the gradient of its own, `π_trainer`. Each
token's loss is multiplied by a function of `r = π_trainer(token) / π_server(token)`. Weights are detached.

| function | weight | default bounds | source |
|---|---|---|---|
| `token_tis` | `min(r, C)` by token | C = 2 | FP8-RL, arXiv 2601.18150 |
| `sequence_tis` | `min(R, C)`, with `R = Π r` over a sequence | C = 2 | Liu et al. |
| `masked_is` | `R`, or `r`, if it is at most C, else 0 | C = 2 | Liu et al. |
| `icepop` | `r` if it is in [α, β], else 0 | α = 0.5, β = 5 | IcePop, arXiv 2510.18855 |

Token-level truncation is also in Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025.
Liu et al. is "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", 2025.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm_fp8ext.trainer.log_ratio import log_ratio

TIS_CAP = 2.0
"""Cap C of truncated importance sampling in FP8-RL."""
ICEPOP_BOUNDS = (0.5, 5.0)
"""Bounds α and β of IcePop."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A rule that turns ratios of probabilities into weights. The default is FP8-RL's token-level TIS.

    Raises:
        ValueError: A level or an action that does not exist, or bounds that are not `0 ≤ low < high`.
    """

    level: Literal["token", "sequence"] = "token"
    """Ratios are of tokens, or of sequences: the product over the tokens that count."""
    outside: Literal["truncate", "mask"] = "truncate"
    """A ratio outside the bounds becomes the nearest bound, or a weight of 0."""
    low: float = 0.0
    high: float = TIS_CAP
    """Bounds, which belong to what is inside. An infinite `high` truncates nothing."""

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence"):
            raise ValueError(f"level: expected 'token' or 'sequence', found {self.level!r}")
        if self.outside not in ("truncate", "mask"):
            raise ValueError(f"outside: expected 'truncate' or 'mask', found {self.outside!r}")
        if not 0 <= self.low < self.high:
            raise ValueError(f"bounds: expected 0 <= low < high, found low={self.low}, high={self.high}")

    def weights(self, trainer_logprobs: Tensor, server_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Return the weights by which a loss `[batch, tokens]` is multiplied.

        Args:
            trainer_logprobs, server_logprobs, mask: as `log_ratio` takes them, `[batch, tokens]` each.

        Returns:
            `[batch, tokens]` at the level of tokens, `[batch, 1]` at that of sequences. Detached, float64 if one of the
            logprobs is, else float32. 0 where the mask is, and for sequences without a token that counts.

        Raises:
            ValueError: Inputs that `log_ratio` refuses.
        """
        return self.weights_of(log_ratio(trainer_logprobs, server_logprobs, mask), mask)

    @torch.no_grad()
    def weights_of(self, log_ratios: Tensor, mask: Tensor) -> Tensor:
        """Return the weights of log-ratios that `log_ratio` computed with this mask. Shapes are those of `weights`."""
        ratios = self.ratios_of(log_ratios)
        if self.outside == "truncate":
            bounded = ratios.clamp(self.low, self.high)
        else:
            bounded = torch.where(self._is_outside(ratios), torch.zeros_like(ratios), ratios)
        return torch.where(self._counted(mask), bounded, torch.zeros_like(bounded))

    @torch.no_grad()
    def clipped(self, log_ratios: Tensor, mask: Tensor) -> Tensor:
        """Tell which ratios are outside the bounds, as bool of the shape of `weights`. What is masked is not."""
        return self._is_outside(self.ratios_of(log_ratios)) & self._counted(mask)

    def ratios_of(self, log_ratios: Tensor) -> Tensor:
        """Return `exp` of the log-ratios, `[batch, tokens]`, or of their sums, `[batch, 1]`."""
        return torch.exp(log_ratios if self.level == "token" else log_ratios.sum(-1, keepdim=True))

    def _is_outside(self, ratios: Tensor) -> Tensor:
        return (ratios < self.low) | (ratios > self.high)

    def _counted(self, mask: Tensor) -> Tensor:
        return mask != 0 if self.level == "token" else (mask != 0).any(-1, keepdim=True)


ICEPOP = Correction(outside="mask", low=ICEPOP_BOUNDS[0], high=ICEPOP_BOUNDS[1])
"""IcePop with the bounds of its paper."""


def token_tis(
    trainer_logprobs: Tensor, server_logprobs: Tensor, mask: Tensor, *, cap: float = TIS_CAP
) -> Tensor:
    """Return `min(r, cap)` for each token, `[batch, tokens]`: token-level truncated importance sampling.

    FP8-RL's correction. Its bias is that of the truncated tail; `cap=math.inf` has none, and the most variance.
    Inputs, dtypes and errors are those of `Correction.weights`.
    """
    return Correction(high=cap).weights(trainer_logprobs, server_logprobs, mask)


def sequence_tis(
    trainer_logprobs: Tensor, server_logprobs: Tensor, mask: Tensor, *, cap: float = TIS_CAP
) -> Tensor:
    """Return `min(Π r, cap)` for each sequence, `[batch, 1]`: sequence-level truncated importance sampling.

    The product is over tokens that count. Inputs, dtypes and errors are those of `Correction.weights`.
    """
    return Correction(level="sequence", high=cap).weights(trainer_logprobs, server_logprobs, mask)


def masked_is(
    trainer_logprobs: Tensor,
    server_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = TIS_CAP,
    level: Literal["token", "sequence"] = "sequence",
) -> Tensor:
    """Return ratios, and 0 for those above `cap`: masked importance sampling.

    `[batch, 1]` for sequences, `[batch, tokens]` for tokens. What is masked stays in a loss's denominator, unless the caller
    takes it out. Inputs, dtypes and errors are those of `Correction.weights`.
    """
    return Correction(level=level, outside="mask", high=cap).weights(trainer_logprobs, server_logprobs, mask)


def icepop(
    trainer_logprobs: Tensor,
    server_logprobs: Tensor,
    mask: Tensor,
    *,
    low: float = ICEPOP_BOUNDS[0],
    high: float = ICEPOP_BOUNDS[1],
) -> Tensor:
    """Return `r` for each token, and 0 for those outside `[low, high]`: two-sided masking.

    `[batch, tokens]`. A token that the trainer finds much less likely than the server did is masked as well.
    Inputs, dtypes and errors are those of `Correction.weights`.
    """
    return Correction(outside="mask", low=low, high=high).weights(trainer_logprobs, server_logprobs, mask)
