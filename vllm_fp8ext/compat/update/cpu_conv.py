# SPDX-License-Identifier: Apache-2.0
"""Has Gated DeltaNet on CPUs read convolutions whose weights lie as a checkpoint has them.

vLLM packs such a weight after loading on CPUs with BF16 instructions, and tells its kernel so for every weight. Weights that
updates exchange stay as they are loaded (`KeptLinearMethod`): read as packed ones, they would be others.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.layers.linear import is_kept

FEATURE: str = "core"
WHY: str = "Convolve with weights that stay exchangeable: vLLM's CPU kernel takes all for packed ones."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_causal_conv1d_fwd_cpu",
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_causal_conv1d_update_cpu",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's CPU layer looks whether its weight is packed"


def install() -> None:
    """Look from now on whether a weight is packed. Idempotent."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    wrap(gdn_attention, "_causal_conv1d_fwd_cpu", _wrap_causal_conv1d)
    wrap(gdn_attention, "_causal_conv1d_update_cpu", _wrap_causal_conv1d)


def _wrap_causal_conv1d(original: Callable[..., Any]) -> Callable[..., Any]:
    def convolve(*, weight: Tensor, is_weight_packed: bool, **named: Any) -> Any:
        if is_kept(weight):
            weight, is_weight_packed = weight.view(weight.shape[0], -1), False
        return original(weight=weight, is_weight_packed=is_weight_packed, **named)

    return convolve
