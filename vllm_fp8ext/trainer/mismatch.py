# SPDX-License-Identifier: Apache-2.0
"""Measures of how far the server's policy is from the trainer's, over sampled tokens.

With `l = log π_trainer(token) − log π_server(token)` and `r = exp(l)`, means over tokens estimate `KL(π_server ‖ π_trainer)`:

- k1: `−l`. Unbiased; a sample can be negative.
- k3: `r − 1 − l`. Unbiased where the server can sample all that the trainer can; never negative, less variance.

Source: J. Schulman, "Approximating KL Divergence", 2020 (http://joschu.net/blog/kl-approx.html).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_fp8ext.log import logger
from vllm_fp8ext.trainer.correction import Correction
from vllm_fp8ext.trainer.log_ratio import log_ratio
from vllm_fp8ext.trainer.version_spans import WeightVersion, version_indices

POSITION_EDGES = (0, 64, 256, 1024, 4096, 16384)
"""First output tokens of the ranges of positions; the last one has no end."""
WARN_KL = 0.01
"""Mean k3 by token above which `log_mismatch` warns."""
PREFIX = "mismatch/"
TOKEN_TIS = Correction()


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Measures over some tokens, all in nats or shares of 1."""

    tokens: int
    """Tokens that count."""
    kl_k1: float
    """Mean of k1."""
    kl_k3: float
    """Mean of k3."""
    mean_difference: float
    """Mean of `|l|`."""
    mean_ratio: float
    """Mean of `r`: near 1 for as long as the server can sample what the trainer can."""
    largest_ratio: float
    """Largest `r`."""
    effective_sample_size: float
    """`(Σ r)² / (n Σ r²)`, from 1/n to 1: the share of tokens that would do as well without a mismatch (Kish)."""
    corrected_sample_size: float
    """The same of the correction's weights; 0 where all of them are 0."""
    clipped_share: float
    """Share of tokens whose ratio, or whose sequence's ratio, the correction truncates or masks."""


class _Measured(NamedTuple):
    """A batch's log-ratios and what a correction makes of them, each `[batch, tokens]`, in float64."""

    log_ratios: Tensor
    weights: Tensor
    clipped: Tensor
    counted: Tensor

    def over(self, chosen: Tensor | None = None) -> Mismatch | None:
        """Summarize the tokens that count and are chosen; None without one. Reads the device once."""
        counted = self.counted if chosen is None else self.counted & chosen
        difference, weights, clipped = self.log_ratios[counted], self.weights[counted], self.clipped[counted]
        count = difference.numel()
        if not count:
            return None
        ratio = torch.exp(difference)
        squares = weights.square().sum()
        ess = torch.exp(2 * torch.logsumexp(difference, 0) - torch.logsumexp(2 * difference, 0)) / count
        corrected = weights.sum().square() / (count * squares.clamp_min(torch.finfo(squares.dtype).tiny))
        values = [
            -difference.mean(),
            (torch.expm1(difference) - difference).clamp_min(0).mean(),
            difference.abs().mean(),
            ratio.mean(),
            ratio.max(),
            ess.clamp_max(1),
            corrected.clamp_max(1),
            clipped.to(difference.dtype).mean(),
        ]
        k1, k3, mean_difference, mean_ratio, largest, ess_share, corrected_share, share = torch.stack(
            values
        ).tolist()
        return Mismatch(
            tokens=count,
            kl_k1=k1,
            kl_k3=k3,
            mean_difference=mean_difference,
            mean_ratio=mean_ratio,
            largest_ratio=largest,
            effective_sample_size=ess_share,
            corrected_sample_size=corrected_share,
            clipped_share=share,
        )


@torch.no_grad()
def _measured(trainer: Tensor, server: Tensor, mask: Tensor, correction: Correction) -> _Measured:
    log_ratios = log_ratio(trainer, server, mask).double()
    counted = mask != 0
    weights = correction.weights_of(log_ratios, mask).expand_as(log_ratios)
    clipped = correction.clipped(log_ratios, mask).expand_as(counted)
    return _Measured(log_ratios, weights, clipped, counted)


def measure(
    trainer_logprobs: Tensor, server_logprobs: Tensor, mask: Tensor, *, correction: Correction = TOKEN_TIS
) -> Mismatch:
    """Measure the mismatch over all tokens that count.

    Args:
        trainer_logprobs, server_logprobs, mask: `[batch, tokens]` each, as `log_ratio` takes them.
        correction: the rule whose clipped share and weights are measured.

    Raises:
        ValueError: Inputs that `log_ratio` refuses.
    """
    mismatch = _measured(trainer_logprobs, server_logprobs, mask, correction).over()
    assert mismatch is not None, "log_ratio refuses a mask without a token that counts"
    return mismatch


def measure_by_position(
    trainer_logprobs: Tensor,
    server_logprobs: Tensor,
    mask: Tensor,
    *,
    correction: Correction = TOKEN_TIS,
    edges: Sequence[int] = POSITION_EDGES,
) -> dict[tuple[int, int | None], Mismatch]:
    """Measure the mismatch by ranges of positions: column 0 is the first output token.

    Args:
        edges: first positions of the ranges, ascending from 0.

    Returns:
        A `Mismatch` for each `(start, end)` with a token that counts. `end` is exclusive, and None for the last range.

    Raises:
        ValueError: Inputs that `log_ratio` refuses, or edges that don't ascend from 0.
    """
    return _by_position(_measured(trainer_logprobs, server_logprobs, mask, correction), edges)


def _by_position(measured: _Measured, edges: Sequence[int]) -> dict[tuple[int, int | None], Mismatch]:
    if not edges or edges[0] != 0 or any(first >= second for first, second in pairwise(edges)):
        raise ValueError(f"edges: expected positions that ascend from 0, found {list(edges)}")
    positions = torch.arange(measured.counted.shape[1], device=measured.counted.device)
    ranges: dict[tuple[int, int | None], Mismatch] = {}
    for start, end in zip(edges, [*edges[1:], None], strict=True):
        mismatch = measured.over(
            (positions >= start) & (positions < (len(positions) if end is None else end))
        )
        if mismatch is not None:
            ranges[start, end] = mismatch
    return ranges


def measure_by_weight_version(
    trainer_logprobs: Tensor,
    server_logprobs: Tensor,
    mask: Tensor,
    weight_versions: Sequence[Sequence[Mapping[str, Any]]],
    *,
    correction: Correction = TOKEN_TIS,
) -> dict[WeightVersion, Mismatch]:
    """Measure the mismatch by the weights that sampled each token.

    Args:
        weight_versions: for each sequence the spans of the server's answer: `{"version", "start", "end", "epoch",
            "instance"}`. `start` and `end` count output tokens, and so columns.

    Returns:
        A `Mismatch` for each weight version with a token that counts, by instance and epoch.

    Raises:
        ValueError: Inputs that `log_ratio` refuses; spans of another number of sequences, without a field, outside the
            columns, over one another, or missing for a token that counts.
    """
    measured = _measured(trainer_logprobs, server_logprobs, mask, correction)
    versions, indices = version_indices(weight_versions, measured.counted)
    by_version = {version: measured.over(indices == index) for index, version in enumerate(versions)}
    return {version: mismatch for version, mismatch in by_version.items() if mismatch is not None}


def log_mismatch(
    trainer_logprobs: Tensor,
    server_logprobs: Tensor,
    mask: Tensor,
    *,
    weight_versions: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    correction: Correction = TOKEN_TIS,
    edges: Sequence[int] = POSITION_EDGES,
    warn_kl: float = WARN_KL,
    write: Callable[[dict[str, float]], object] | None = None,
) -> dict[str, float]:
    """Measure a batch, warn if the policies are far apart, return all measures by name.

    Names are those of `Mismatch`, after `mismatch/` for all tokens, `mismatch/position_64_255/` for a range of positions
    (`position_16384_up` for the last), and `mismatch/epochs_behind_1/` for tokens of weights that are one epoch older than
    the newest of their instance in the batch.

    Args:
        weight_versions: spans as `measure_by_weight_version` takes them.
        warn_kl: mean k3 above which a warning goes to the logger `vllm.fp8ext`; `math.inf` for none.
        write: called with the result: `wandb.log`, say.

    Raises:
        ValueError: What `measure`, `measure_by_position` and `measure_by_weight_version` refuse.
    """
    measured = _measured(trainer_logprobs, server_logprobs, mask, correction)
    mismatch = measured.over()
    assert mismatch is not None, "log_ratio refuses a mask without a token that counts"
    values = _named(PREFIX, mismatch)
    for (start, end), part in _by_position(measured, edges).items():
        values |= _named(f"{PREFIX}position_{start}_{'up' if end is None else end - 1}/", part)
    if weight_versions is not None:
        versions, indices = version_indices(weight_versions, measured.counted)
        behind = epochs_behind(versions).to(indices.device)[indices.clamp_min(0)]
        for epochs in sorted({*behind[measured.counted].tolist()}):
            part_behind = measured.over(behind == epochs)
            assert part_behind is not None, "a number of epochs that some token has"
            values |= _named(f"{PREFIX}epochs_behind_{epochs}/", part_behind)
    if mismatch.kl_k3 > warn_kl:
        logger.warning(
            "the server's policy is far from the trainer's: KL (k3) %.2e by token, expected at most %.2e; "
            "effective sample size %.3f, largest ratio %.3g, clipped share %.4f",
            *(
                mismatch.kl_k3,
                warn_kl,
                mismatch.effective_sample_size,
                mismatch.largest_ratio,
                mismatch.clipped_share,
            ),
        )
    if write is not None:
        write(values)
    return values


def _named(prefix: str, mismatch: Mismatch) -> dict[str, float]:
    return {prefix + name: float(value) for name, value in asdict(mismatch).items()}


def epochs_behind(versions: Sequence[WeightVersion]) -> Tensor:
    """Return how many epochs each version is behind the newest one of its instance, int64."""
    newest: dict[str | None, int] = {}
    for version in versions:
        newest[version.instance] = max(version.epoch, newest.get(version.instance, version.epoch))
    return torch.tensor([newest[version.instance] - version.epoch for version in versions], dtype=torch.int64)
