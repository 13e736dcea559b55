# SPDX-License-Identifier: Apache-2.0
"""Shapes of the linear layers of models that people train."""

import itertools
from collections.abc import Iterable

from vllm_fp8ext.kernels.gemm import decode_gemm_configs

MODELS = {
    "Qwen3-0.6B": (1024, 3072, 2048, 1024),
    "Qwen3-1.7B": (2048, 6144, 2048, 1024),
    "Qwen3-4B": (2560, 9728, 4096, 1024),
    "Qwen3-8B": (4096, 12288, 4096, 1024),
    "Qwen3-14B": (5120, 17408, 5120, 1024),
    "Qwen3-32B": (5120, 25600, 8192, 1024),
    "Qwen2.5-7B": (3584, 18944, 3584, 512),
    "Qwen2.5-72B": (8192, 29568, 8192, 1024),
    "Llama-3.1-8B": (4096, 14336, 4096, 1024),
    "Llama-3.1-70B": (8192, 28672, 8192, 1024),
}
"""Hidden and intermediate size, columns of Q, and of K or V."""


def projections(models: Iterable[str], tp: Iterable[int]) -> list[tuple[int, int]]:
    """Return distinct weight shapes on one of `tp` ranks that `decode_gemm` takes."""
    shapes = []
    for name, parts in itertools.product(models, tp):
        hidden, intermediate, q, kv = MODELS[name]
        shapes += [
            *((2 * intermediate // parts, hidden), (hidden, intermediate // parts)),
            *(((q + 2 * kv) // parts, hidden), (hidden, q // parts)),
        ]
    return [(n, k) for n, k in dict.fromkeys(shapes) if decode_gemm_configs.usable(1, n, k)]
