# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin for tests: memory for what one pipeline stage hands to the next, on CPUs.

vLLM makes it in a trial step, which it leaves out on a CPU with `--enforce-eager`: the first request would end the engine.
"""

from typing import Any


def register() -> None:
    """The entry point. Idempotent."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.sync_and_gather_intermediate_tensors
    if hasattr(original, "fp8ext_made"):
        return

    def gather(self: Any, *args: Any, **named: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **named)

    gather.fp8ext_made = True  # type: ignore[attr-defined]  # a mark of ours
    GPUModelRunner.sync_and_gather_intermediate_tensors = gather
