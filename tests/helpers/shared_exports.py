# SPDX-License-Identifier: Apache-2.0
"""Stands in for CUDA IPC on a CPU: tensors in files of shared memory, told of as torch tells of those on a GPU."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

FOLDER = Path("/dev/shm")
EVENT = bytes(range(64))


class SharedExports:
    """Memory that others open by its name, and that is removed in the end."""

    def __init__(self) -> None:
        self._files: list[Path] = []
        self._names: dict[int, str] = {}

    def buffer(self, size: int) -> Tensor:
        """Make shared memory, uint8 `[size]`."""
        path = FOLDER / f"fp8ext-test-{os.getpid()}-{secrets.token_hex(4)}"
        self._files.append(path)
        storage = torch.UntypedStorage.from_file(str(path), True, size)
        made = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._names[made.data_ptr()] = path.name
        return made

    def reduce(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """Stands in for `reduce_tensor`; a tensor that does not lie in a buffer is copied to one."""
        name = self._names.get(tensor.data_ptr())
        if name is None:
            data = tensor.detach().contiguous().view(-1).view(torch.uint8)
            copy = self.buffer(max(data.numel(), 1))
            copy[: data.numel()].copy_(data)
            name = self._names[copy.data_ptr()]
        size = tensor.numel() * tensor.itemsize
        return None, (
            *(type(tensor), tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage, tensor.dtype, 0),
            *((b"\x02s" + name.encode()).ljust(66, b"\0"), size, 0, False, b"/torch_1_2_3", 7, EVENT, False),
        )

    def close(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)


@contextmanager
def shared_exports() -> Iterator[SharedExports]:
    exports = SharedExports()
    try:
        yield exports
    finally:
        exports.close()


@contextmanager
def without_cuda(exports: SharedExports) -> Iterator[None]:
    """Let vLLM's IPC trainer engine run without a GPU, on these exports."""
    empty = torch.empty

    def shared_empty(*shape: Any, device: Any = None, **more: Any) -> Tensor:
        return exports.buffer(*shape) if device == "cuda" else empty(*shape, device=device, **more)

    stream = SimpleNamespace(synchronize=lambda: None)
    module = "vllm.distributed.weight_transfer"
    with (
        mock.patch(f"{module}.ipc_engine.reduce_tensor", exports.reduce),
        mock.patch(f"{module}.packed_tensor.reduce_tensor", exports.reduce),
        mock.patch("torch.accelerator.current_device_index", return_value=0),
        mock.patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(uuid="cpu")),
        mock.patch("torch.cuda.current_stream", return_value=stream),
        mock.patch("torch.cuda.ipc_collect"),
        mock.patch("torch.empty", shared_empty),
    ):
        yield
