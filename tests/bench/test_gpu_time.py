# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_fp8ext.bench.gpu_time import GpuTime


def test_a_kernel_that_waits_for_another_is_not_charged_for_it():
    result = GpuTime.of([("gemm", 1000, 10_000), ("norm", 0, 4000), ("norm", 20_000, 21_000)])
    assert result.kernels == [("gemm", 6.0, 1), ("norm", 5.0, 2)]
    assert result.busy == 11
    assert result.milliseconds == 21


def test_a_kernel_beside_a_longer_one_is_not_charged():
    result = GpuTime.of([("copy", 2000, 3000), ("gemm", 0, 5000), ("norm", 4000, 6000)])
    assert result.kernels == [("gemm", 5.0, 1), ("norm", 1.0, 1), ("copy", 0.0, 1)]
    assert result.busy == pytest.approx(6)


def test_a_gpu_that_did_nothing():
    assert GpuTime.of([]) == GpuTime(0.0, [])
