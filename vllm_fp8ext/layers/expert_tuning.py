# SPDX-License-Identifier: Apache-2.0
"""Lists the numbers of tokens for which vLLM has tuned its Triton kernel of experts."""

from collections.abc import Sequence

from vllm_fp8ext.kernels.numerics.layout import BLOCK

FEATURE: str = "warmup"
WHY: str = "Compile the kernels of experts before the server is ready: vLLM warms up its own methods alone."
GAIN: str = "no request waits for a compiler"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "compile the kernels of experts before the server is ready": (
        "vllm.model_executor.layers.fused_moe.fused_moe:get_moe_configs(E, N, dtype, block_n, block_k)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM warms up kernels of a plugin's methods"
GPU_ONLY: bool = True

_UNTUNED = [4, 8, 16, 64]
"""Most tokens of each of the sizes that vLLM takes where it has tuned none."""


def triton_tokens(experts: int, width: int) -> Sequence[int]:
    """List numbers of tokens, for so many experts of `width` on this rank."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

    return sorted(get_moe_configs(experts, width, "fp8_w8a8", BLOCK, BLOCK) or {}) or _UNTUNED
