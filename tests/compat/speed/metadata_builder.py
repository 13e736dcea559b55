# SPDX-License-Identifier: Apache-2.0
"""What stands for vLLM's builder of metadata, as far as ours asks it."""

from types import SimpleNamespace
from typing import Any

from vllm.config import CUDAGraphMode

from vllm_fp8ext.compat.speed import decode_prefill_split


class Builder:
    """What computes a schedule, for layers of which `taken` are ours."""

    aot_sliding_window: Any = (-1, -1)

    def __init__(
        self, *taken: bool, graphs: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, drafts: Any = None
    ) -> None:
        layers = {str(index): SimpleNamespace(impl=SimpleNamespace()) for index in range(len(taken))}
        for layer, is_taken in zip(layers.values(), taken, strict=True):
            if is_taken:
                decode_prefill_split.mark_decodes(layer.impl)
        self.layer_names = list(layers)
        compilation = SimpleNamespace(static_forward_context=layers | {"other": None}, cudagraph_mode=graphs)
        self.vllm_config = SimpleNamespace(
            compilation_config=compilation,
            speculative_config=drafts,
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )

    def _get_scheduler_metadata(self, **asked: Any) -> Any:
        return asked
