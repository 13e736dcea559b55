# SPDX-License-Identifier: Apache-2.0
"""Which kernels are taken where DeepGEMM is there and does not run."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.envs
import vllm.platforms
from vllm.model_executor.kernels import linear

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernel_settings import KernelSettings
from vllm_fp8ext.kernels.gemm import decode_gemm
from vllm_fp8ext.kernels.gemm.selection import GemmRoute
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.runtime.cuda_kernel import CudaError
from vllm_fp8ext.layers import deep_gemm, expert_gemm, gemm
from vllm_fp8ext.layers.deep_gemm import deep_gemm_runs
from vllm_fp8ext.layers.gemm_kernels import TRITON, triton
from vllm_fp8ext.layers.gemm_kernels import decode_gemm as decode_kernel
from vllm_fp8ext.layers.gemm_kernels.decode_gemm import decode_gemm_runs
from vllm_fp8ext.layers.gemm_kernels.vllm_kernels import vllm_supports
from vllm_fp8ext.log import log_once

SHAPE = 6144, 4096


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM takes this machine for one with a Hopper GPU and all of its kernels."""
    platform = SimpleNamespace(is_cuda=lambda: True, is_device_capability=lambda _: True)
    for module in (gemm, expert_gemm, vllm.platforms):
        monkeypatch.setattr(module, "current_platform", platform)
    monkeypatch.setattr(linear, "is_supported_and_can_implement_kernel", lambda *_: (True, None))
    monkeypatch.setattr(deep_gemm, "is_deep_gemm_supported", lambda: True)
    monkeypatch.setattr(decode_kernel, "decode_gemm_runs", lambda: True)
    cached = (deep_gemm_runs, decode_gemm_runs, vllm_supports)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def experts() -> Any:
    return SimpleNamespace(in_dtype=torch.bfloat16, num_experts=128, experts_per_token=8)


def test_deep_gemm_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(deep_gemm, "multiply", lambda *size: tried.append(size))
    for shape in (SHAPE, (4096, 4096)):
        route = gemm.select(shape, torch.bfloat16, KernelSettings())
        assert route is not None
        assert route.gemm == "deep_gemm"
    experts_route = expert_gemm.select(experts(), 2048, KernelSettings())
    assert experts_route is not None
    assert experts_route.gemm == "deep_gemm"
    assert len(tried) == 1


def test_the_choice_for_a_shape_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deep_gemm, "multiply", lambda *_: None)
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "vllm.fp8ext"):
        for shape in (SHAPE, SHAPE, (4096, 4096)):
            gemm.select(shape, torch.bfloat16, KernelSettings())
    assert caplog.text.count("blockfp8 multiplies 6144x4096 by decode_gemm up to") == 1
    assert caplog.text.count("blockfp8 multiplies 4096x4096 by") == 1


@pytest.mark.parametrize(("columns", "stored"), [(2240, 2304), (4096, 4096), (200, 200)])
def test_columns_that_are_no_whole_blocks_are_stored_with_zeros(
    columns: int, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_gemm, "multiply", lambda *_: None)
    assert gemm.stored_columns(columns) == stored
    route = gemm.select((1536, columns), torch.bfloat16, KernelSettings())
    assert (route is not None and route.gemm == "deep_gemm") is (stored % 128 == 0)
    monkeypatch.setattr(gemm, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    assert gemm.stored_columns(columns) == columns


def test_without_a_compiler_the_next_best_kernel_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: int) -> None:
        raise RuntimeError("nvcc: not found")

    monkeypatch.setattr(deep_gemm, "multiply", fail)
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        route = gemm.select(SHAPE, torch.bfloat16, KernelSettings())
        experts_route = expert_gemm.select(experts(), 2048, KernelSettings())
    assert route is not None
    assert experts_route is not None
    assert (route.gemm, experts_route.gemm) == ("cutlass", "triton")
    assert caplog.text.count("DeepGEMM does not run here") == 1
    assert "nvcc: not found" in caplog.text


def test_where_decode_gemm_does_not_run_the_others_take_few_tokens_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise CudaError("found no libnvrtc")

    monkeypatch.setattr(deep_gemm, "multiply", lambda *_: None)
    with_it = gemm.select(SHAPE, torch.bfloat16, KernelSettings())
    assert with_it is not None
    assert with_it.decode_tokens > 0
    monkeypatch.setattr(decode_kernel, "decode_gemm_runs", decode_gemm_runs)
    monkeypatch.setattr(decode_gemm, "decode_gemm", fail)
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        for shape in (SHAPE, (4096, 4096)):
            assert gemm.select(shape, torch.bfloat16, KernelSettings()) == GemmRoute(0, "deep_gemm")
        asked = KernelSettings.model_validate({"shapes": {"*": {"decode_tokens": 8}}})
        with pytest.raises(ConfigError, match="decode_gemm does not take weights"):
            gemm.select(SHAPE, torch.bfloat16, asked)
    assert caplog.text.count("decode_gemm does not run here") == 1


def test_decode_gemm_is_not_tried_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "multiply", lambda *_: None)
    monkeypatch.setattr(decode_kernel, "decode_gemm_runs", pytest.fail)
    for section in (
        {"shapes": {"*": {"decode_tokens": 0, "gemm": "deep_gemm"}}},
        {"batch_invariant": True},
    ):
        route = gemm.select(SHAPE, torch.bfloat16, KernelSettings.model_validate(section))
        assert route == GemmRoute(0, "deep_gemm")
    with pytest.raises(pytest.fail.Exception):
        gemm.select(SHAPE, torch.bfloat16, KernelSettings())


def test_what_varies_with_the_batch_is_not_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's Triton kernels have sizes by the number of tokens, but with a variable of vLLM's."""
    monkeypatch.setattr(deep_gemm, "is_deep_gemm_supported", lambda: False)
    monkeypatch.setattr(
        triton, "block_sizes", lambda n, k: {} if vllm.envs.VLLM_BATCH_INVARIANT else {1: "small"}
    )
    settings = KernelSettings.model_validate({"batch_invariant": True, "shapes": {"*": {"gemm": "triton"}}})
    for invariant in (False, True):
        monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", invariant)
        chosen = [
            lambda: gemm.select(SHAPE, torch.bfloat16, settings),
            lambda: expert_gemm.select(experts(), 2048, KernelSettings(batch_invariant=True)),
        ]
        for select in chosen:
            if invariant:
                assert "triton" in str(select())
            else:
                with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT=1"):
                    select()
        varied = gemm.select(SHAPE, torch.bfloat16, settings.model_copy(update={"batch_invariant": False}))
        assert varied is not None
        assert varied.gemm == "triton"


def test_a_compiler_that_comes_or_changes_is_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled graphs name the kernels that ran with the one before."""
    for name in ("CUDA_PATH", "DG_JIT_NVCC_COMPILER", "DG_JIT_USE_NVRTC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    seen = [deep_gemm.compiler()]
    for when in (1, 2):
        nvcc.touch()
        os.utime(nvcc, (when, when))
        seen.append(deep_gemm.compiler())
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    seen.append(deep_gemm.compiler())
    assert len(set(seen)) == 4
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))  # which vLLM sets when it begins to use DeepGEMM
    assert deep_gemm.compiler() == seen[-1]


@pytest.mark.parametrize("tokens", [0, 7, 8, 21])
def test_vllms_triton_kernel_gets_as_many_tokens_as_it_can_tell_apart(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    seen: list[int] = []

    def multiply(codes: Any, weight: Any, scales: Any, *_: Any) -> torch.Tensor:
        seen.append(len(codes))
        assert len(codes) == len(scales)
        assert len(codes) * max(weight.shape) <= 2048
        return codes[:, :1].float() + scales[:, :1]

    monkeypatch.setattr(fp8_utils, "w8a8_triton_block_scaled_mm", multiply)
    monkeypatch.setattr(triton, "MOST_ELEMENTS", 2048)
    rows = torch.arange(tokens * 128).view(tokens, 128)
    x = Quantized(rows, rows[:, :1].float())
    out = TRITON.run(x, torch.empty(256, 128), torch.empty(2, 1), torch.bfloat16)
    assert torch.equal(out, rows[:, :1] * 2.0)
    assert sum(seen) == tokens
