# SPDX-License-Identifier: Apache-2.0
"""Log-ratio of the trainer's to the server's probability of each sampled token. Checks its inputs."""

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST_LOGPROB = 0.01
"""A logprob above this is none. Rounding takes the logprob of a certain token a little above 0."""


@torch.no_grad()
def log_ratio(trainer_logprobs: Tensor, server_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `log π_trainer(token) − log π_server(token)`, and 0 where the mask is 0.

    Args:
        trainer_logprobs: `[batch, tokens]`, any floating dtype: of the sampled tokens, by the model that is trained.
        server_logprobs: the same shape, any floating dtype: of the same tokens, as the server sampled them.
        mask: the same shape, bool or numbers that are 0 or 1; 1 for tokens that count. What the logprobs are elsewhere does
            not matter, NaN and infinity included.

    Returns:
        `[batch, tokens]`, detached: float64 if one of the logprobs is, else float32.

    Raises:
        ValueError: Shapes, devices or dtypes that don't fit, a mask of other numbers or without a 1, and logprobs that count
            and are not finite or are above 0. All problems are listed.
    """
    inputs = {"trainer_logprobs": trainer_logprobs, "server_logprobs": server_logprobs, "mask": mask}
    _raise(_form_problems(inputs))
    counted = mask != 0
    _raise(_value_problems(inputs, counted))
    dtype = torch.promote_types(
        torch.promote_types(trainer_logprobs.dtype, server_logprobs.dtype), torch.float32
    )
    difference = trainer_logprobs.to(dtype) - server_logprobs.to(dtype)
    return torch.where(counted, difference, torch.zeros((), dtype=dtype, device=mask.device))


def _raise(problems: Iterator[str]) -> None:
    if lines := list(problems):
        raise ValueError("\n".join(lines))


def _form_problems(inputs: dict[str, Tensor]) -> Iterator[str]:
    """Tell what is wrong with shapes, devices and dtypes."""
    first, *_ = inputs.values()
    for name, tensor in inputs.items():
        if tensor.dim() != 2:
            yield f"{name}: expected a shape [batch, tokens], found {list(tensor.shape)}"
        elif tensor.shape != first.shape:
            yield f"{name}: expected the shape of trainer_logprobs, {list(first.shape)}, found {list(tensor.shape)}"
        if tensor.device != first.device:
            yield f"{name}: expected the device of trainer_logprobs, {first.device}, found {tensor.device}"
        if name != "mask" and not tensor.is_floating_point():
            yield f"{name}: expected a floating dtype, found {tensor.dtype}"


def _value_problems(inputs: dict[str, Tensor], counted: Tensor) -> Iterator[str]:
    """Tell what is wrong with the values, which are read from the device at once."""
    mask = inputs["mask"]
    faults = [("mask", "expected 0 and 1 alone, found {} other values", counted & (mask != 1))]
    for name in ("trainer_logprobs", "server_logprobs"):
        values = inputs[name]
        finite = torch.isfinite(values)
        nan = "expected finite logprobs of tokens that count, found {} that are NaN, of {}"
        infinite = "expected finite logprobs of tokens that count, found {} that are infinite, of {}"
        positive = "expected logprobs, which are 0 or less, found {} above 0, of {}"
        faults += [
            (name, nan, counted & torch.isnan(values)),
            (name, infinite, counted & torch.isinf(values)),
            (name, positive, counted & finite & (values > LARGEST_LOGPROB)),
        ]
    total, *counts = torch.stack([counted.sum(), *(fault.sum() for _, _, fault in faults)]).tolist()
    if not total:
        yield f"mask: expected at least one token that counts, found none of {counted.numel()}"
    for (name, text, _), count in zip(faults, counts, strict=True):
        if count:
            yield f"{name}: {text.format(count, total)}"
