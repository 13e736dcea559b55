# SPDX-License-Identifier: Apache-2.0
"""A trainer that speaks vLLM's weight transfer to a server over HTTP and Gloo, as vLLM's own clients do."""

import contextlib
import json
import socket
import threading
from typing import Any, Self

import httpx
from torch import Tensor

from vllm_fp8ext.demo.server import Server

from .gloo_trainer import Beside, GlooGroup, open_trainer_endpoint, packed_broadcast_producer

TRANSFER = ("--weight-transfer-config", json.dumps({"backend": "nccl"}))
BUCKET = 400_000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Trainer:
    """Calls a server's native routes, as vLLM's clients do, and holds the group."""

    def __init__(self, server: Server, *, packed: bool = True, bucket: int = BUCKET) -> None:
        self.server, self.packed, self.bucket = server, packed, bucket
        self.http = httpx.Client(
            base_url=server.url, auth=("x", server.key), timeout=300, transport=httpx.HTTPTransport()
        )
        self.group: GlooGroup | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.group = None
        self.http.close()

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def call(self, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
        reply = self.post(path, body, **more)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def refused(self, path: str, body: Any = None, **more: Any) -> tuple[int, str, str]:
        reply = self.post(path, body, **more)
        assert reply.status_code >= 400, reply.text
        error = reply.json()["error"]
        return reply.status_code, error["type"], error["message"]

    def init_info(self, **more: Any) -> dict[str, Any]:
        world = self.http.get("/get_world_size").json()["world_size"]
        info = {
            "master_address": "127.0.0.1",
            "master_port": free_port(),
            "rank_offset": 1,
            "world_size": world + 1,
        }
        packing = {"packed": self.packed, "packed_buffer_size_bytes": self.bucket}
        return {**info, **packing, **more}

    def init(self) -> None:
        info = self.init_info()
        with Beside(lambda: self.call("/init_weight_transfer_engine", {"init_info": info})) as answer:
            self.group = open_trainer_endpoint(info)
        assert answer.result == {"message": "Weight transfer initialized"}

    def try_init(self) -> httpx.Response:
        """Initialize; the group is made beside, for as long as the others do not come to it."""
        info = self.init_info()

        def endpoint() -> None:
            with contextlib.suppress(Exception):
                self.group = open_trainer_endpoint(info)

        threading.Thread(target=endpoint, daemon=True).start()
        return self.post("/init_weight_transfer_engine", {"init_info": info})

    def send(self, tensors: dict[str, Tensor], **lies: Any) -> httpx.Response:
        told = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        body = {"update_info": {**told, **lies}}
        assert self.group is not None
        with (
            Beside(lambda: self.post("/update_weights", body)) as answer,
            contextlib.suppress(RuntimeError),  # the server has left the group, and says why
        ):
            if self.packed:
                packed_broadcast_producer(
                    iter(tensors.items()), self.group, 0, lambda item: item[1], self.bucket
                )
            else:
                for tensor in tensors.values():
                    self.group.broadcast(tensor)
        reply: httpx.Response = answer.result
        return reply

    def push(self, tensors: dict[str, Tensor], *, each: int | None = None, version: str | None = None) -> Any:
        self.call("/start_weight_update", {})
        items = list(tensors.items())
        for first in range(0, len(items), each or len(items)):
            reply = self.send(dict(items[first : first + (each or len(items))]))
            assert (reply.status_code, reply.json()) == (200, {"message": "Weights updated"})
        return self.call("/finish_weight_update", {"weight_version": version} if version else {})
