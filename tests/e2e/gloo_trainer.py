# SPDX-License-Identifier: Apache-2.0
"""A trainer's side of vLLM's weight transfer on a CPU: vLLM's process group and packing, with Gloo in place of NCCL."""

import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES, pack_tensors

from vllm_fp8ext.update.transports.native.group import GLOO_PREFIX

SECONDS = 60


class GlooGroup:
    """Stands in for `PyNcclCommunicator`: rank 0 of a group between CPUs."""

    def __init__(self, group: StatelessProcessGroup, seconds: float = SECONDS) -> None:
        self.group = group
        store = PrefixStore(GLOO_PREFIX, group.store)
        self._gloo = ProcessGroupGloo(store, group.rank, group.world_size, timedelta(seconds=seconds))

    def broadcast(self, tensor: Tensor, src: int = 0, stream: Any = None) -> None:
        """Send a tensor's bytes, after their number."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        self.send(torch.tensor([data.numel()]))
        self.send(data)

    def send(self, data: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._gloo.broadcast([data], options).wait()


def open_trainer_endpoint(init_info: dict[str, Any], rank: int = 0) -> GlooGroup:
    """Stands in for `nccl_common.trainer_init`."""
    host, port, size = (init_info[name] for name in ("master_address", "master_port", "world_size"))
    return GlooGroup(StatelessProcessGroup.create(host, port, rank, size, store_timeout=SECONDS))


def packed_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]],
    group: GlooGroup,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
    buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    num_buffers: int = 2,
) -> None:
    """Stands in for `packed_nccl_broadcast_producer`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*exceeds buffer_size_bytes")  # such a tensor ends its bucket
        _send_all(iterator, group, src, post_iter_func, buffer_size_bytes)


def _send_all(
    iterator: Iterator[tuple[str, Tensor]],
    group: GlooGroup,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
    buffer_size_bytes: int,
) -> None:
    while (chunk := pack_tensors(iterator, post_iter_func, buffer_size_bytes)) is not None:
        group.broadcast(chunk.packed_tensor, src)


class Beside:
    """A call in a thread of its own: a trainer sends while the server's answer is on its way."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    @property
    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
