# SPDX-License-Identifier: Apache-2.0
"""Whether DeepGEMM multiplies on this machine.

Replaces nothing; vLLM asks only whether DeepGEMM is there and knows the GPU. It compiles its kernels as it first needs them,
with an nvcc that may be missing or too old. Can go once vLLM finds that out itself and takes another kernel.
"""

import logging
import os
import shutil
from functools import cache
from pathlib import Path

import torch
from vllm.utils.deep_gemm import fp8_gemm_nt, is_deep_gemm_supported

from vllm_fp8ext.kernels.quantized import empty
from vllm_fp8ext.kernels.reference import blocks

logger = logging.getLogger("vllm.fp8ext")

_CHOICES = "DG_JIT_USE_NVRTC", "DG_JIT_CPP_STANDARD"
"""What decides, beside the compiler, whether and how it compiles."""
TRIED = 128, 4096, 4096
"""Tokens, rows and columns that every version takes."""


def compiler() -> str:
    """The nvcc that it would find, of when that is, and what the user chose. What runs here may change with it."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    listed = [os.environ.get("DG_JIT_NVCC_COMPILER"), shutil.which("nvcc")]
    listed += [f"{home}/bin/nvcc" for home in homes if home]
    found = next((Path(path) for path in listed if path and Path(path).is_file()), None)
    changed = found.stat().st_mtime_ns if found else None
    return f"{found} {changed} {[os.environ.get(name) for name in _CHOICES]}"


@torch.inference_mode()
def multiply(m: int, n: int, k: int) -> None:
    """Multiply `[m, k]` by `[n, k]`, of any values, on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    weight = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(blocks(n), blocks(k), dtype=torch.float32, device=device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    fp8_gemm_nt(empty(m, k, device), (weight, scales), out, is_deep_gemm_e8m0_used=False)
    torch.cuda.synchronize()


@cache
def deep_gemm_runs() -> bool:
    """Whether it is there and has multiplied once; a warning says why not."""
    if not is_deep_gemm_supported():
        return False
    try:
        multiply(*TRIED)
    except Exception as error:  # whatever a compiler that is missing or too old comes to
        logger.warning("blockfp8: DeepGEMM does not run here, the next best kernels do: %s", error)
        return False
    return True
