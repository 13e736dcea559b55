# SPDX-License-Identifier: Apache-2.0
"""Moments of an optimizer in FP8: groups of 128 values, each with a scale and an exponent that expands its range.

For a group with magnitudes from `min` (of those that are not 0) to `amax`, and a format from `least` to `largest`:

    k = log(largest / least) / log(amax / min)
    code = fp8(sign(x) largest (|x| / amax)^k)
    x ≈ sign(code) amax (|code| / largest)^(1/k)

So the group's range becomes the format's range: `amax` is the largest code, and `min` the smallest, which is never 0. Where
the range of the group is larger than the format's, k is below 1. The scale of COAT, `amax^k / largest`, is kept as `amax`.
Source: COAT, arXiv 2410.19313, section 4 (dynamic range expansion).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_fp8ext.trainer.recipes import FP8_DTYPES, Fp8Name

GROUP = 128
"""Values of a group."""
LARGEST_EXPONENT = 256.0
"""Bound on k, which groups of nearly equal values would exceed."""
LOG2_RANGE: dict[Fp8Name, float] = {
    "e4m3": 17.807354922057604,  # 448 / 2^-9
    "e5m2": 31.807354922057606,  # 57344 / 2^-16
}
"""Binary logarithm of the ratio of a format's largest magnitude to its smallest."""
NO_EXPANSION = 1.0
"""Exponent of a group without expansion."""


class Moments(NamedTuple):
    """Quantized values. `codes`: FP8, of their shape. `scales`, fp32, and `exponents`, BF16: `[groups]`.

    Groups are of 128 values in the order of memory; the last one may be smaller. A scale is the group's amax.
    """

    codes: Tensor
    scales: Tensor
    exponents: Tensor


def groups_of(count: int) -> int:
    """Return the number of groups that so many values are."""
    return -(-count // GROUP)


def empty_moments(like: Tensor, name: Fp8Name) -> Moments:
    """Return moments that are 0, of the shape and on the device of a tensor."""
    groups = groups_of(like.numel())
    return Moments(
        torch.zeros(like.shape, dtype=torch.uint8, device=like.device).view(FP8_DTYPES[name]),
        torch.zeros(groups, dtype=torch.float32, device=like.device),
        torch.ones(groups, dtype=torch.bfloat16, device=like.device),
    )


def quantize_moments(values: Tensor, name: Fp8Name, *, expand: bool = True) -> Moments:
    """Quantize values of any shape and floating dtype. Without range expansion k is 1.

    NaN and infinity give a scale that is not finite, and values that are NaN.
    """
    dtype = FP8_DTYPES[name]
    groups = _in_groups(values.float())
    magnitudes = groups.abs()
    amax = magnitudes.amax(1)
    k = torch.full_like(amax, NO_EXPANSION)
    if expand:
        smallest = torch.where(magnitudes > 0, magnitudes, torch.inf).amin(1)
        k = torch.where(amax > smallest, LOG2_RANGE[name] / (amax.log2() - smallest.log2()), LARGEST_EXPONENT)
        k = torch.where(amax > 0, k.clamp_max(LARGEST_EXPONENT), NO_EXPANSION)
    exponents = k.to(torch.bfloat16)
    share = (magnitudes / amax[:, None]).log2()  # of 0: -inf, which is 0 again
    scaled = torch.finfo(dtype).max * torch.exp2(share * exponents.float()[:, None])
    scaled = torch.where(amax[:, None] > 0, scaled, amax[:, None])  # NaN stays NaN
    codes = torch.copysign(scaled, groups).to(dtype)
    return Moments(_back(codes.view(torch.uint8), values).view(dtype), amax, exponents)


def moment_values(moments: Moments) -> Tensor:
    """Return fp32 values, of the shape of the codes."""
    dtype = moments.codes.dtype
    codes = _in_groups(moments.codes.float())
    inverse = 1.0 / moments.exponents.float()[:, None]
    share = torch.exp2((codes.abs().log2() - _log2_of(torch.finfo(dtype).max)) * inverse)
    values = torch.where(codes == 0, 0.0, moments.scales[:, None] * share)
    return _back(torch.copysign(values, codes), moments.codes)


def _log2_of(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).log2())


def _in_groups(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


def _back(groups: Tensor, like: Tensor) -> Tensor:
    return groups.reshape(-1)[: like.numel()].view(like.shape)
