# SPDX-License-Identifier: Apache-2.0
"""Lists the numbers of tokens at which DeepGEMM takes another kernel, as vLLM knows them."""

from torch import Tensor

FEATURE: str = "warmup"
WHY: str = "Compile DeepGEMM's kernels before the server is ready: it picks one by the number of tokens."
GAIN: str = "no request waits for a compiler"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "compile DeepGEMM's kernels before the server is ready": (
        "vllm.model_executor.warmup.deep_gemm_warmup:_generate_optimal_warmup_m_values("
        "max_tokens, n, device)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM warms up kernels of a plugin's methods"
GPU_ONLY: bool = True


def token_counts(codes_NK: Tensor, tokens: range) -> list[int]:
    """List those of `tokens`; none where `VLLM_DEEP_GEMM_WARMUP` is `skip`."""
    import vllm.envs as envs
    from vllm.model_executor.warmup.deep_gemm_warmup import _generate_optimal_warmup_m_values

    if envs.VLLM_DEEP_GEMM_WARMUP == "skip" or not tokens:
        return []
    counts = _generate_optimal_warmup_m_values(tokens[-1], codes_NK.shape[0], codes_NK.device)
    return [count for count in counts if count in tokens]
