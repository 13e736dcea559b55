# SPDX-License-Identifier: Apache-2.0
"""checkpoint-engine's worker extension. It takes buckets by ZMQ and a handle, and ends by `process_weights_after_loading`."""

from types import SimpleNamespace

import torch
from trainer_packages import DEVICE, find, without_cuda

find("checkpoint_engine")
without_cuda()

from checkpoint_engine import worker  # noqa: E402


class SharedWorkerExtension(worker.VllmColocateWorkerExtension):
    """Names the CPU where checkpoint-engine asks for the UUID of a GPU."""

    @property
    def _device_uuid(self) -> str:
        return f"{DEVICE}-{torch.distributed.get_rank()}"


if not torch.cuda.is_available():
    worker.DeviceManager = lambda: SimpleNamespace(device_module=torch.cuda)
