# SPDX-License-Identifier: Apache-2.0
"""veRL's worker extension. It takes buckets by ZMQ, and marks the end by `process_weights_after_loading`."""

from trainer_packages import find, without_cuda

find("verl", "verl.utils", "verl.workers", "verl.workers.rollout", "verl.workers.rollout.vllm_rollout")
without_cuda()

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension  # noqa: E402

__all__ = ["vLLMColocateWorkerExtension"]
