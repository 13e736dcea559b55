# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin for tests: the engine queues a step ahead, as it does on GPUs, where vLLM's CPU build runs one at a time.

So what a commit does with steps in flight happens here, too: of requests whose tokens are in flight none is scheduled again
before, as with pipeline-parallel stages.
"""

BATCHES = 2


def register() -> None:
    """The entry point. Idempotent."""
    from vllm.config import VllmConfig

    assert isinstance(VllmConfig.max_concurrent_batches, property)
    VllmConfig.max_concurrent_batches = property(lambda _: BATCHES)  # type: ignore[assignment]  # for tests
