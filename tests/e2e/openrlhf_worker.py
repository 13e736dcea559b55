# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's worker extension. It takes one tensor a call, and marks no end."""

from pathlib import Path
from typing import Any

import torch
from trainer_packages import find, from_file, without_cuda

find("openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray")
without_cuda()

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap  # noqa: E402


class SharedGroup:
    """In place of the group of trainer and workers: a broadcast brings what the trainer has put into a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        """Fill a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensor.copy_(from_file(self._path, dtype, tensor.numel()).view(tensor.shape))


class SharedWorkerWrap(WorkerWrap):
    """Joins a group in shared memory."""

    def join(self, path: str) -> None:
        """Take the place of `init_process_group`."""
        self._model_update_with_ray = False
        self._model_update_group = SharedGroup(path)
        if not torch.cuda.is_available():
            torch.empty = _on_cpu(torch.empty)  # type: ignore[assignment]
            torch.cuda.current_stream = lambda *args: None  # type: ignore[assignment,return-value]

    def leave(self, path: str) -> None:
        """End what was joined."""
        Path(path).unlink()


def _on_cpu(empty: Any) -> Any:
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = empty(*args, device="cpu" if device == "cuda" else device, **kwargs)
        return tensor

    return make
