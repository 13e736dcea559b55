# SPDX-License-Identifier: Apache-2.0
"""Tells whether DeepGEMM multiplies on this machine.

Replaces nothing; vLLM asks only whether DeepGEMM is there and knows the GPU. It compiles its kernels as it first needs them,
with an nvcc that may be missing or too old. Can go once vLLM finds that out itself and takes another kernel.
"""

import os
import shutil
from functools import cache
from pathlib import Path

import torch
from vllm.utils.deep_gemm import fp8_gemm_nt, is_deep_gemm_supported

from vllm_fp8ext.layers.trials import SHAPE, operands, runs

_CHOICES = "DG_JIT_USE_NVRTC", "DG_JIT_CPP_STANDARD"
"""Environment variables that decide, beside the compiler, whether and how it compiles."""
TOKENS = 128
"""Number of tokens that every version takes."""


def compiler() -> str:
    """The nvcc that it would find, of when that is, and what the user chose. What runs here may change with it."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    listed = [os.environ.get("DG_JIT_NVCC_COMPILER"), shutil.which("nvcc")]
    listed += [f"{home}/bin/nvcc" for home in homes if home]
    nvcc = next((Path(path) for path in listed if path and Path(path).is_file()), None)
    changed = nvcc.stat().st_mtime_ns if nvcc else None
    return f"{nvcc} {changed} {[os.environ.get(name) for name in _CHOICES]}"


@torch.inference_mode()
def multiply(m: int, n: int, k: int) -> None:
    """Multiply `[m, k]` by `[n, k]`, of any values, on the current GPU."""
    x, codes_NK, scales_NbKb = operands(m, n, k)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=codes_NK.device)
    fp8_gemm_nt(x, (codes_NK, scales_NbKb), out, is_deep_gemm_e8m0_used=False)
    torch.cuda.synchronize()


@cache
def deep_gemm_runs() -> bool:
    """Tell whether it is there and has multiplied once; a warning says why not."""
    return is_deep_gemm_supported() and runs("DeepGEMM", lambda: multiply(TOKENS, *SHAPE))
