# SPDX-License-Identifier: Apache-2.0
"""What the driver refuses."""

import ctypes

import pytest

from vllm_fp8ext.kernels.runtime import cuda_kernel


def test_a_driver_without_a_function_is_too_old() -> None:
    with pytest.raises(cuda_kernel.CudaError, match="cuNoSuchFunction: this driver is too old"):
        cuda_kernel._call(ctypes.CDLL(None), "cuNoSuchFunction")
