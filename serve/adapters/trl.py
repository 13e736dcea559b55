# SPDX-License-Identifier: Apache-2.0
"""TRL pushes weights by this package's client: over HTTP from a CPU, by CUDA IPC or NCCL from a GPU, LoRA merged by TRL.

with use_client("http://rollout:8000", key):  # transport="ipc" on the server's GPU
    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="server"))

AsyncGRPOTrainer(..., weight_transfer=WeightPush("http://rollout:8000", key))
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.client.clients import TIMEOUT
from vllm_fp8ext.serve.client.flow import Endpoint


class WeightPush:
    """A `weight_transfer` of `AsyncGRPOTrainer`: nothing is paused, since a commit takes its turn between two steps.

    `options`: of `Client.push`, `transport` and `chunk_bytes` say.
    """

    def __init__(self, url: str, key: str | None = None, **options: Any) -> None:
        self._client, self._options = Client(url, key), options

    def init_weight_transfer(self) -> None:
        """Require that the server takes updates."""
        self._client.manifest()

    def pause(self) -> None:
        """Do nothing: the server goes on with the weights that it has."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Push `(name, tensor)` pairs; tensors that do not come keep their served weights."""
        epoch = self._client.weights().epoch
        self._client.push(iterator, partial=True, base_epoch=epoch, **self._options)

    def resume(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Close the connection."""
        self._client.close()


@contextlib.contextmanager
def use_client(url: str, key: str | None = None, **options: Any) -> Iterator[None]:
    """Connect trainers that are made inside with the server at `url`.

    They generate by it, and push to it by this package's client.
    """
    from trl.generation import vllm_client, vllm_generation

    endpoint = Endpoint.of(url, key, timeout=TIMEOUT, retries=0)

    class PushingClient(vllm_client.VLLMClient):
        """TRL's client, with other methods where weights are sent."""

        def __init__(self, base_url: str, **more: Any) -> None:
            super().__init__(base_url=endpoint.url, **more)
            self.session.auth = ("fp8ext", endpoint.key or "")  # of `/server_info`
            self._push = WeightPush(url, key, **options)

        def init_communicator(self, device: Any = 0) -> None:
            self._push.init_weight_transfer()

        def update_named_params(
            self, metadata: Sequence[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Any]]
        ) -> None:
            self._push.send_weights(named_params)

        def reset_prefix_cache(self) -> None:
            """Do nothing: no cached block is of other weights."""

        def close_communicator(self) -> None:
            self._push.destroy()

    original, vllm_generation.VLLMClient = vllm_generation.VLLMClient, PushingClient
    try:
        yield
    finally:
        vllm_generation.VLLMClient = original
