# SPDX-License-Identifier: Apache-2.0
"""SkyRL's worker extension. It begins and ends by vLLM's layerwise reload, and takes chunks by handles of memory."""

from trainer_packages import find, without_cuda

find("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.inference_servers")
without_cuda()

from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import (  # noqa: E402
    NewInferenceWorkerWrap,
)

__all__ = ["NewInferenceWorkerWrap"]
