# SPDX-License-Identifier: Apache-2.0
"""vLLM's own weight transfer by CUDA IPC, by its own trainer engine: to stock servers as a rival, and to ours.

`native`: as vLLM's HTTP client sends it, with pickled handles. `native-packed`: the same, of tensors that are copied to a
buffer. `native-typed`: by this package's client, with typed handles.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.loadtest.vllm_dev_routes import VllmDevRoutes
from vllm_fp8ext.serve.adapters.vllm import WeightSyncClient

SERVE = ("--weight-transfer-config", json.dumps({"backend": "ipc"}))
"""Arguments of `vllm serve`."""
STOCK_VARIABLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Variables of a stock server, which unpickles handles."""
SETTINGS = {"native_pickled_handles": True, "trusted_clients": ["127.0.0.1/32"]}
"""Settings of a blockfp8 server, which reads such handles. vLLM's client sends keys in URLs alone, which errors show."""


class Native:
    """A trainer whose tensors lie on a GPU of the server's machine; `tensors`: the first ones that it holds.

    With a `stock` server generation is paused around an update, and the prefix cache reset, as vLLM's documentation asks.
    """

    def __init__(self, server: Server, way: str, tensors: Mapping[str, Tensor], *, stock: bool) -> None:
        self._server, self._stock = server, stock
        typed = way == "native-typed"
        client = WeightSyncClient(server.url, server.key) if typed else HTTPVLLMWeightSyncClient(server.url)
        self._source = HeldTensors(tensors)
        largest = max(tensor.nbytes for tensor in tensors.values())
        init_info = IPCTrainerInitInfo(
            rank=0,
            packed=way == "native-packed",
            packed_buffer_size_bytes=max(IPCTrainerInitInfo.packed_buffer_size_bytes, largest),
        )
        self._engine = IPCTrainerWeightTransferEngine.trainer_init(
            init_info, client=client, source=self._source
        )

    def push(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Send tensors of the same names and shapes.

        Returns seconds of `transfer`, from `start` to the answer of `finish`, and of the server's `pause`.

        Raises:
            httpx.HTTPError: the server refused.
        """
        self._source.tensors = tensors
        with VllmDevRoutes(self._server.url).paused() if self._stock else contextlib.nullcontext():
            begin = time.monotonic()
            self._engine.send_weights()
            seconds = {"transfer": time.monotonic() - begin}
        seconds["bytes"] = float(sum(tensor.nbytes for tensor in tensors.values()))
        if not self._stock:
            with self._server.client() as client:
                last = client.weights().last_update
            assert last is not None
            seconds["pause"] = last.seconds["pause"]
        return seconds


class HeldTensors(WeightSource):
    """Tensors that a trainer holds. vLLM 0.32 calls `metadata` and iterates; later releases read it, and call `iter_full`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.tensors.items())

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        """Yield each tensor."""
        return iter(self)

    def _metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    metadata: Any = cached_property(_metadata) if hasattr(WeightSource, "iter_full") else _metadata
