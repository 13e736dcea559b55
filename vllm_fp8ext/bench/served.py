# SPDX-License-Identifier: Apache-2.0
"""How exact the linear layers of a served model are: what engines that are timed are asked first."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.testing import kernel_cases
from vllm_fp8ext.layers.linear import CODES, SCALES
from vllm_fp8ext.layers.lm_head import products

ROWS = 64
"""Rows of each product that are compared."""


@torch.inference_mode()
def linear_errors(worker: Any, tokens: Sequence[int]) -> dict[str, float]:
    """Return each shape's largest error (`NxK`), as a share of its bound.

    Products have these numbers of tokens. `worker`: vLLM's, which serves with blockfp8. Each product goes to the kernel
    that takes so many tokens there, with activations that have outlier channels.
    """
    errors: dict[str, float] = {}
    for layer, method in products(worker.model_runner.get_model()):
        codes, scales = getattr(layer, CODES), getattr(layer, SCALES)
        shape = "x".join(map(str, codes.shape))
        if shape in errors:
            continue
        form = method.scale_format
        errors[shape] = 0.0
        for m in tokens:
            x = kernel_cases.activations(m, codes.shape[1], codes.device.type)
            out = method.apply(layer, x)[:ROWS]
            quantized = reference.quantize_activation(x[:ROWS], form)
            errors[shape] = max(errors[shape], kernel_cases.gemm_error(out, *quantized, codes, scales))
    return errors
