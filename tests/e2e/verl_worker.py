# SPDX-License-Identifier: Apache-2.0
"""veRL's worker extension. It takes buckets by ZMQ, and marks the end by `process_weights_after_loading`."""

from trainer_packages import VERL, find, without_cuda

find(*VERL)
without_cuda()

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension  # noqa: E402

__all__ = ["vLLMColocateWorkerExtension"]
