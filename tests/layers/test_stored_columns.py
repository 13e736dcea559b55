# SPDX-License-Identifier: Apache-2.0
"""A layer whose columns are no whole blocks, as a GPU keeps it: with zeros behind them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE
from vllm_fp8ext.kernels.testing import kernel_cases
from vllm_fp8ext.layers import gemm
from vllm_fp8ext.layers.linear import BlockFp8LinearMethod
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget

N, K, STORED = 200, 208, 256


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "stored_columns", lambda columns: -(-columns // 128) * 128)


def made(weight: Tensor, *, shadow: bool = False, columns: int | None = K) -> tuple[Any, Any]:
    """A method and a layer that is loaded, or a shadow's. To make a method takes a configuration of vLLM's."""
    method: Any = object.__new__(BlockFp8LinearMethod)
    method.scale_format, method.serialized, method.shadow = "fp32", weight.dtype == FP8_DTYPE, shadow
    method.route, method.columns = None, columns
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return method, layer


def zeros_behind(layer: Any) -> bool:
    return layer.weight.shape == (N, STORED) and not layer.weight.view(torch.uint8)[:, K:].any()


@pytest.mark.parametrize("serialized", [False, True])
def test_a_layer_is_loaded(serialized: bool) -> None:
    weight = kernel_cases.weight(N, K, "cpu")
    codes, scales = reference.quantize_weight(weight)
    method, layer = made(codes if serialized else weight)
    if serialized:
        layer.weight_scale_inv = nn.Parameter(scales.clone(), requires_grad=False)
    method.process_weights_after_loading(layer)
    (matrix,) = method.matrices(layer)
    assert matrix.scales is not None
    assert kernel_cases.same(matrix.values, codes)
    assert kernel_cases.same(matrix.scales, scales)
    assert zeros_behind(layer)
    x = kernel_cases.activations(3, K, "cpu")
    out = method.apply(layer, x)
    quantized = reference.quantize_activation(x)
    assert kernel_cases.gemm_error(out, *quantized, codes, scales) < 1


def test_an_update_fills_a_shadow() -> None:
    """Block rows that come whole and in parts; nothing is written behind the columns."""
    weight = kernel_cases.weight(N, K, "cpu", seed=1)
    method, layer = made(torch.empty(N, K, dtype=torch.bfloat16, device="meta"), shadow=True)
    (before,) = method.matrices(layer)
    assert (before.values.shape, before.scales) == ((N, K), None)
    method.allocate(layer, torch.device("cpu"))
    (matrix,) = method.matrices(layer)
    assert matrix.scales is not None
    target = QuantizedTarget(matrix.values, matrix.scales, torch.bfloat16, "fp32")
    target.quantize(0, weight[:128])
    target.fill(150, weight[150:], (128, N))
    target.fill(128, weight[128:150], (128, 150))
    codes, scales = reference.quantize_weight(weight)
    assert kernel_cases.same(matrix.values, codes)
    assert kernel_cases.same(matrix.scales, scales)
    assert zeros_behind(layer)
    _, inplace = made(torch.empty(N, K, dtype=torch.bfloat16, device="meta"), shadow=True)
    method.adopt_from(inplace, layer)
    assert inplace.weight.data_ptr() == layer.weight.data_ptr()


def test_whole_blocks_have_nothing_behind_them() -> None:
    method, layer = made(kernel_cases.weight(N, K, "cpu"), columns=None)
    method.process_weights_after_loading(layer)
    assert layer.weight.shape == (N, K)
