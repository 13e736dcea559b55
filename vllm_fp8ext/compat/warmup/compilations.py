# SPDX-License-Identifier: Apache-2.0
"""Counts what was compiled in a worker process since it began, by compiler.

A server whose counts stand still compiles nothing. vLLM's own monitor (`--jit-monitor-mode`) sees Triton's kernels only, and
logs or raises; it does not count.
"""

import os
from pathlib import Path

import torch._dynamo.utils

from vllm_fp8ext.kernels.runtime import compile_counts

FEATURE: str = "core"
WHY: str = (
    "Tell whether a server compiles while it serves: vLLM's monitor sees Triton alone, and does not count."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM counts compilations of all compilers"

_DEEP_GEMM_CACHE = "DG_JIT_CACHE_DIR"
"""vLLM sets it when it first asks for DeepGEMM."""


def counts() -> dict[str, int]:
    """Count kernels by NVRTC, Triton and DeepGEMM, and graphs by `torch.compile`.

    DeepGEMM tells no count: its kernels are those on disk, whoever compiled them.
    """
    compiled = {"nvrtc": compile_counts.counts["nvrtc"], "triton": compile_counts.counts["triton"]}
    compiled["deep_gemm"] = _deep_gemm_kernels(os.environ.get(_DEEP_GEMM_CACHE))
    compiled["torch"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return compiled


def _deep_gemm_kernels(folder: str | None) -> int:
    try:
        return sum(1 for _ in os.scandir(Path(folder) / "cache")) if folder else 0
    except OSError:
        return 0
