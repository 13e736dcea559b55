# SPDX-License-Identifier: Apache-2.0
"""vLLM's own managers of CUDA graphs, as far as their lists of graphs need them."""

from types import SimpleNamespace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from vllm_fp8ext.compat.speed import piecewise_capture_sizes


def graph_manager(
    kind: type = ModelCudaGraphManager,
    *,
    tokens: int = 1000,
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    sizes: tuple[int, ...] = (1, 64, 512),
    requests: int = 1024,
    longest: int = 4096,
    varlen: bool = False,
) -> Any:
    """Of an engine that was configured for graphs of up to so many `tokens`; `sizes` are vLLM's."""
    made = object.__new__(kind)
    made.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=list(sizes), max_cudagraph_capture_size=max(sizes, default=0)
    )
    made.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=longest),
        additional_config={piecewise_capture_sizes.KEY: tokens},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        compilation_config=made.compilation_config,
    )
    made.max_num_reqs, made.decode_query_len, made.varlen_decode = requests, 1, varlen
    made.cudagraph_mode, made.lora_capture_cases, made.ubatch_runner = mode, [0], None
    made._candidates, made._capture_descs = {}, {}
    made._init_candidates()
    return made
