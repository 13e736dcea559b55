# SPDX-License-Identifier: Apache-2.0
"""Recipes: which scales and formats a trainer's FP8 layers compute with.

| recipe | scale | formats, forward and backward | source |
|---|---|---|---|
| `BlockScaling` | the server's: 1×128 inputs, 128×128 weights | E4M3; E4M3, E5M2 or BF16 | DeepSeek-V3, arXiv 2412.19437 |
| `DelayedScaling` | one per tensor, from magnitudes of past calls | HYBRID: E4M3; E5M2 | NVIDIA Transformer Engine |
| `CurrentScaling` | one per tensor, from the tensor itself | HYBRID: E4M3; E5M2 | NVIDIA Transformer Engine |
"""

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_fp8ext.kernels.numerics.reference import ScaleFormat

Fp8Name = Literal["e4m3", "e5m2"]
FP8_DTYPES: dict[Fp8Name, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""FP8 formats by name."""
SERVED_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that a server computes in."""


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `ValueError` unless a setting is one of the choices."""
    if value not in choices:
        raise ValueError(
            f"{name}: expected {' or '.join(repr(choice) for choice in choices)}, found {value!r}"
        )


@dataclass(frozen=True, kw_only=True)
class BlockScaling:
    """The server's numerics, and gradients in blocks. Forward operands are, bit for bit, those of a server.

    Raises:
        ValueError: A setting that does not exist.
    """

    scale_format: ScaleFormat = "fp32"
    """Format of scales: as the server's `scale_format`."""
    backward: Literal["e4m3", "e5m2", "bf16"] = "e4m3"
    """Format of gradients in the products of the backward pass. `bf16` quantizes none: products are in the input's dtype."""
    served_dtype: torch.dtype = torch.bfloat16
    """Dtype of the server's model (`--dtype`). Master weights are rounded to it first, as `push` and the server do."""
    gemm: Literal["auto", "deep_gemm", "triton", "reference"] = "auto"
    """Product of FP8 operands on a GPU. `auto` takes DeepGEMM where it is installed, or else `triton`, and logs which.
    `reference` multiplies in fp32, as CPUs do."""

    def __post_init__(self) -> None:
        require_choice("scale_format", self.scale_format, ("fp32", "pow2"))
        require_choice("backward", self.backward, ("e4m3", "e5m2", "bf16"))
        require_choice("served_dtype", self.served_dtype, SERVED_DTYPES)
        require_choice("gemm", self.gemm, ("auto", "deep_gemm", "triton", "reference"))


@dataclass(frozen=True, kw_only=True)
class CurrentScaling:
    """One scale per tensor, `fp8_max / amax / 2^margin`, from the tensor that is quantized.

    Raises:
        ValueError: A setting that does not exist.
    """

    formats: Literal["hybrid", "e4m3"] = "hybrid"
    """`hybrid`: E4M3 forward, E5M2 for gradients. `e4m3`: E4M3 for both."""
    margin: int = 0
    """Powers of two that a scale leaves free."""

    def __post_init__(self) -> None:
        require_choice("formats", self.formats, ("hybrid", "e4m3"))

    @property
    def forward_dtype(self) -> torch.dtype:
        """FP8 dtype of inputs and weights."""
        return torch.float8_e4m3fn

    @property
    def backward_dtype(self) -> torch.dtype:
        """FP8 dtype of gradients."""
        return torch.float8_e5m2 if self.formats == "hybrid" else torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(CurrentScaling):
    """One scale per tensor, from the largest magnitudes (amax) that earlier calls had. What is larger saturates.

    Raises:
        ValueError: A setting that does not exist, or a history of no calls.
    """

    history: int = 1024
    """Calls whose amax is remembered: Transformer Engine's `amax_history_len`."""
    algorithm: Literal["max", "most_recent"] = "max"
    """Amax of the history that a scale is made of: the largest, or the last one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("algorithm", self.algorithm, ("max", "most_recent"))
        if self.history < 1:
            raise ValueError(f"history: expected at least 1 call, found {self.history}")
