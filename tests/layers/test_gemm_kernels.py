# SPDX-License-Identifier: Apache-2.0
"""A kernel that is registered is known to settings, selection, layers, warm-up and benchmarks: copy this for a new one."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.gemm import linear
from vllm_fp8ext.kernels.gemm.registry import DECODE_GEMM, GEMM_KERNELS, GemmKernel, register
from vllm_fp8ext.kernels.gemm.selection import GemmRoute
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.testing import kernel_cases
from vllm_fp8ext.layers import gemm_kernels


def multiply(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype) -> Tensor:
    return reference.gemm(*x, codes_NK, scales_NbKb).to(dtype)


NEW = GemmKernel(
    name="new",
    run=multiply,
    supports=lambda n, k, dtype: k >= 256 and dtype == "bfloat16",
    warmup_shapes=lambda codes_NK, tokens: tokens[:: codes_NK.shape[0]],
    rows_multiple=8,
)


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> GemmKernel:
    """One that is registered before all others for a while."""
    monkeypatch.setattr(gemm_kernels, "LARGE_M", (NEW, *gemm_kernels.LARGE_M))
    monkeypatch.setitem(GEMM_KERNELS, NEW.name, NEW)
    return NEW


def choose(gemm: str) -> Settings:
    return Settings.parse({"fp8ext": {"kernels": {"shapes": {"*": {"gemm": gemm}}}}})


def test_settings_take_it(new: GemmKernel) -> None:
    assert choose(new.name).kernels.route(8, 256).gemm == new.name


def test_settings_refuse_what_is_not_registered() -> None:
    *names, last = map(repr, gemm_kernels.names())
    expected = f"shapes.*.gemm: Input should be {', '.join(names)} or {last}"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        choose(NEW.name)


@pytest.mark.parametrize(("n", "k", "taken"), [(24, 256, True), (20, 256, False), (24, 128, False)])
def test_it_is_selected_where_it_runs(n: int, k: int, taken: bool, new: GemmKernel, monkeypatch: Any) -> None:
    from vllm_fp8ext.layers import gemm

    monkeypatch.setattr(gemm, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    route = gemm.select(
        (n, k), torch.bfloat16, Settings.parse({"fp8ext": {"kernels": {"batch_invariant": True}}}).kernels
    )
    assert route == (GemmRoute(0, new.name) if taken else None)


def test_a_layer_multiplies_by_it(new: GemmKernel) -> None:
    codes, scales = reference.quantize_weight(kernel_cases.weight(24, 256, "cpu"))
    x = Quantized(*reference.quantize_activation(kernel_cases.activations(5, 256, "cpu")))
    out = linear.quantized_linear(*x, codes, scales, None, 0, new.name)
    assert kernel_cases.gemm_error(out, *x, codes, scales) < 1


def test_the_warm_up_runs_its_shapes_and_the_largest(new: GemmKernel) -> None:
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    from vllm_fp8ext.compat.warmup.warmup import _tokens

    layer: Any = SimpleNamespace(weight=torch.empty(24, 256))
    method: Any = SimpleNamespace(route=GemmRoute(8, new.name))
    assert _tokens(layer, method, 60) == [9, 33, 57, 60]


def test_benchmarks_know_it(new: GemmKernel, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_fp8ext.bench import kernels

    with pytest.raises(SystemExit):
        kernels.main(["--help"])
    assert f"--gemms [NAME ...] kernels for large M that are timed alone: {new.name}," in " ".join(
        capsys.readouterr().out.split()
    )


def test_two_kernels_have_two_names() -> None:
    register(gemm_kernels.CUTLASS)
    with pytest.raises(ValueError, match="cutlass: expected a new name"):
        register(GemmKernel(name="cutlass", run=multiply))


def test_every_kernel_has_its_place() -> None:
    assert [kernel.name for kernel in gemm_kernels.LARGE_M] + [DECODE_GEMM] == list(GEMM_KERNELS)
