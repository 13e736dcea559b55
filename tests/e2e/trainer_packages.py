# SPDX-License-Identifier: Apache-2.0
"""Imports classes of trainers from their own packages, which lie beside the environment without what they need for training.

A GPU's memory is shared by CUDA IPC; on a CPU the same bytes come through shared memory.
"""

import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

TRAINERS = Path(sys.prefix) / "trainers"
"""Where they lie, out of sight of vLLM."""
VERL = ("verl", "verl.utils", "verl.workers", "verl.workers.rollout", "verl.workers.rollout.vllm_rollout")
"""Packages of veRL's worker extension and of its sender."""


def find(*packages: str) -> None:
    """Make packages importable without running what their `__init__` imports."""
    if str(TRAINERS) not in sys.path:
        sys.path.append(str(TRAINERS))
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = [str(TRAINERS.joinpath(*name.split(".")))]
        sys.modules.setdefault(name, package)


def without_cuda() -> None:
    """Let calls that a CPU has no use for do nothing."""
    if torch.cuda.is_available():
        return
    for name in ("synchronize", "ipc_collect", "empty_cache", "set_device"):
        setattr(torch.cuda, name, lambda *args: None)


DEVICE = "a-cpu"
"""In place of the UUID of a GPU."""


def uuid(rank: int) -> str:
    """Return the name by which torch knows a rank's device."""
    return str(torch.cuda.get_device_properties(rank).uuid) if torch.cuda.is_available() else DEVICE


class SharedTorch:
    """Stands for torch in a module of a trainer's, which asks for its GPU."""

    cuda = types.SimpleNamespace(
        current_device=lambda: 0, get_device_properties=lambda index: types.SimpleNamespace(uuid=DEVICE)
    )
    accelerator = types.SimpleNamespace(synchronize=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def from_file(path: str, dtype: str, size: int, *rest: Any) -> torch.Tensor:
    """Rebuild a tensor of `size` elements from memory that a file stands for, as CUDA IPC does from a handle."""
    return torch.from_file(path, shared=True, size=size, dtype=getattr(torch, dtype))


def shared(path: Path, tensor: torch.Tensor, rank: int = 0) -> tuple[torch.Tensor, Any]:
    """Copy a tensor to memory that a rank can open: on its GPU, or a file.

    Returns that memory, which must be kept, and its handle: a function and its arguments, of which the seventh is a device.
    """
    if torch.cuda.is_available():
        copy = tensor.reshape(-1).to(f"cuda:{rank}", copy=True)
        torch.cuda.synchronize(rank)
        return copy, reduce_tensor(copy)
    path.write_bytes(b"\0" * max(tensor.nbytes, 1))
    dtype = str(tensor.dtype).removeprefix("torch.")
    copy = from_file(str(path), dtype, tensor.numel())
    copy.copy_(tensor.reshape(-1))
    return copy, (from_file, (str(path), dtype, tensor.numel(), None, None, None, None))


def buckets(tensors: Sequence[tuple[str, torch.Tensor]], count: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Deal tensors to so many buckets."""
    return [list(tensors[number::count]) for number in range(count)]
