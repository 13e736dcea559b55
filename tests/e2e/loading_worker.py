# SPDX-License-Identifier: Apache-2.0
"""A worker extension that loads weights as trainers do. Tensors come from a folder, so that every rank reads the same."""

from pathlib import Path
from typing import Any

import torch

from vllm_fp8ext.update.transports.wire import stored


class LoadingWorker:
    """For `worker_extension_cls`."""

    model_runner: Any
    model_config: Any

    def load(self, folder: str, names: list[str], change: str = "", end: str = "") -> int:
        """Load tensors by `model.load_weights`, changed as `change` says; then mark the end as `end` says."""
        tensors = dict(stored(Path(folder)))
        bucket = [(name, _changed(tensors[name], change)) for name in names]
        bucket = [(f"module.{name}", tensor) for name, tensor in bucket] if change == "wrapped" else bucket
        bucket = [(f"other.{name}", tensor) for name, tensor in bucket] if change == "unknown" else bucket
        given: Any = _lent(bucket) if change == "lent" else bucket
        loaded = self.model_runner.model.load_weights(weights=given)
        for _, tensor in bucket:
            tensor.fill_(3.0)  # nobody may look at them any more
        if end:
            self.mark(end)
        if change == "raises":
            raise RuntimeError("the trainer's own error")
        return len(loaded)

    def load_in_buckets(self, folder: str, count: int, end: str) -> None:
        """Load a checkpoint in so many buckets, and mark the end."""
        tensors = list(stored(Path(folder)))
        for number in range(count):
            self.between() if number else None
            self.model_runner.model.load_weights(tensors[number::count])
        self.mark(end)

    def load_with_scales(self, folder: str, scales: dict[str, float]) -> None:
        """Load a checkpoint in two batches, the second with scales of the KV cache, and mark the end twice."""
        tensors = list(stored(Path(folder)))
        load = self.model_runner.model.load_weights
        load(weights=tensors[::2])
        load(weights=[*tensors[1::2], *((name, torch.tensor([value])) for name, value in scales.items())])
        self.mark("process_weights_after_loading")
        self.mark("process_weights_after_loading")

    def between(self) -> None:
        """Do what a trainer does before it has the next bucket: tests break it."""

    def mark(self, call: str) -> None:
        """Begin or end an update."""
        from vllm.model_executor.model_loader import reload, utils

        model = self.model_runner.get_model()
        if call == "initialize_layerwise_reload":
            reload.initialize_layerwise_reload(model)
        elif call == "finalize_layerwise_reload":
            reload.finalize_layerwise_reload(model, self.model_config)
        elif call == "process_weights_after_loading":
            utils.process_weights_after_loading(model, self.model_config, torch.device("cpu"))
        else:
            getattr(self, call)()

    def uneven(self, folder: str, names: list[str]) -> None:
        """Load on rank 0 alone."""
        if torch.distributed.get_rank() == 0:
            self.load(folder, names)

    def write(self, name: str) -> None:
        """Write into a served parameter, past every loader."""
        self.model_runner.get_model().get_parameter(name).data.view(torch.uint8)[:1].add_(1)


def _changed(tensor: torch.Tensor, change: str) -> torch.Tensor:
    if change == "fp32":
        return tensor.float()
    if change == "infinite":
        return tensor * torch.inf
    if change == "shape":
        return tensor[:1].clone()
    return tensor.clone()


def _lent(bucket: list[tuple[str, torch.Tensor]]) -> Any:
    """Yield tensors in one memory, where they have one shape."""
    memory: dict[Any, torch.Tensor] = {}
    for name, tensor in bucket:
        place = memory.setdefault((tensor.shape, tensor.dtype), torch.empty_like(tensor))
        place.copy_(tensor)
        yield name, place
