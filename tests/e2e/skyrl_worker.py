# SPDX-License-Identifier: Apache-2.0
"""SkyRL's worker extension. It begins and ends by vLLM's layerwise reload, and takes chunks by handles of memory."""

import torch
from trainer_packages import SharedTorch, find

find("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.inference_servers")

from skyrl.backends.skyrl_train.inference_servers import new_inference_worker_wrap as worker  # noqa: E402

if not torch.cuda.is_available():
    worker.torch = SharedTorch()
NewInferenceWorkerWrap = worker.NewInferenceWorkerWrap
