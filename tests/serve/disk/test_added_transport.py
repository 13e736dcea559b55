# SPDX-License-Identifier: Apache-2.0
"""A transport that is added: a folder's worth of code and two registry entries, tried from the client to the ranks.

`inline` sends a tensor's bytes in the JSON that announces it. Copy this file to test another one.
"""

import asyncio
import base64
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx
import pytest
import torch

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import AsyncClient, Pushable, PushOptions, calls
from vllm_fp8ext.serve.client.everywhere import Everywhere
from vllm_fp8ext.serve.client.flow import Endpoint, Flow
from vllm_fp8ext.serve.client.repeat import call
from vllm_fp8ext.serve.client.source import Manifests, tensors_of
from vllm_fp8ext.serve.client.transports.registry import SENDERS
from vllm_fp8ext.serve.client.transports.sender import ClientTransport
from vllm_fp8ext.update.contract.fields import Body, ChunkNumber
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.dense_tensor import DenseTensor, dense_tensor, lies_within
from vllm_fp8ext.update.transports.memory import BufferMemory, ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.transports.receiver import Receiver
from vllm_fp8ext.update.transports.registry import TRANSPORTS, source_from_dict
from vllm_fp8ext.update.transports.transport import Announcement, Route, ServerLimits, Source, Transport

from .server import DiskServer


class Inline(Body):
    """`POST /updates/{id}/inline`: a tensor with its bytes in base64."""

    n: ChunkNumber
    tensors: list[DenseTensor]
    data: str


@dataclass(frozen=True)
class InlineSource(Source):
    """Bytes in base64."""

    data: str

    transport: ClassVar[str] = "inline"


def announce(body: Mapping[str, Any], limits: ServerLimits) -> Announcement:
    """Describe the chunk; refuse a tensor that its bytes do not hold."""
    size = len(base64.b64decode(body["data"]))
    tensors = [dense_tensor(**tensor) for tensor in body["tensors"]]
    for tensor in tensors:
        if not lies_within(tensor, size):
            message = f"tensor {tensor.spec.name}: expected {tensor.size} bytes, found {size}"
            raise UpdateError("invalid-request", message, status=422)
    return Announcement(source=InlineSource(body["data"]), tensors=tensors)


class InlineReceiver(Receiver[InlineSource]):
    """Decodes the bytes on the rank."""

    @contextmanager
    def open(
        self,
        source: InlineSource,
        tensors: Sequence[StoredTensor],
        as_rows: Collection[str],
        require_wanted: Callable[[], None],
    ) -> Iterator[Iterable[ResidentTensors | TensorRows]]:
        data = torch.frombuffer(bytearray(base64.b64decode(source.data)), dtype=torch.uint8)
        yield self._rank.resident(tensors, BufferMemory(data.to(self._rank.device)))


TRANSPORT = Transport(
    name="inline",
    summary="bytes in the JSON that announces them",
    source=InlineSource,
    receiver=f"{__name__}:InlineReceiver",
    route=Route(path="inline", summary="Take tensors from the body", body=Inline, announce=announce),
)


@dataclass(frozen=True)
class InlineSender:
    """Sends one tensor a chunk."""

    pairs: Iterable[tuple[str, Any]]

    @classmethod
    def prepare(cls, weights: Pushable, options: PushOptions, manifests: Manifests) -> Flow[Self]:
        return cls((yield from tensors_of(weights, manifests, fp8=options.fp8)).pairs)

    def send(
        self,
        updates: Mapping[Endpoint, schema.Update],
        everywhere: Everywhere,
        committed: Sequence[schema.Update] = (),
    ) -> Flow[None]:
        for n, (name, tensor) in enumerate(self.pairs if updates else ()):
            dtype = str(tensor.dtype).removeprefix("torch.")
            listed = [DenseTensor(name=name, dtype=dtype, shape=list(tensor.shape), offset=0)]
            data = base64.b64encode(tensor.numpy().tobytes()).decode()
            body = Inline(n=n, tensors=listed, data=data).model_dump()
            yield from everywhere(list(updates), partial(_post, updates=updates, body=body))


def _post(
    endpoint: Endpoint, updates: Mapping[Endpoint, schema.Update], body: dict[str, Any]
) -> Flow[schema.Update]:
    request = endpoint.request("POST", f"/updates/{updates[endpoint].id}/inline", json=body)
    return call(endpoint, request, calls.UPDATE)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DiskServer:
    monkeypatch.setitem(TRANSPORTS, "inline", TRANSPORT)  # type: ignore[arg-type]
    monkeypatch.setitem(SENDERS, "inline", ClientTransport(name="inline", prepare=InlineSender.prepare))  # type: ignore[arg-type]
    return DiskServer(tmp_path)


def pushed(server: DiskServer, weights: Pushable, **options: Any) -> schema.Update:
    """Push by the client's own code, without a network."""

    async def push() -> schema.Update:
        transport = httpx.ASGITransport(server.app)
        async with AsyncClient("http://here", "key", transport=transport, retries=0) as client:
            return await client.push(weights, transport="inline", **options)  # type: ignore[arg-type]

    return asyncio.run(push())


def test_tensors_come_to_every_rank(server: DiskServer) -> None:
    update = pushed(server, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}, version="v1")
    assert update.state == "committed"
    assert server.ranks.served == {"a": [1.0, 2.0], "b": [3.0, 4.0]}


def test_a_refusal_leaves_what_is_served(server: DiskServer) -> None:
    with pytest.raises(UpdateError, match=r"expected .*\[2\]"):
        pushed(server, {"a": torch.zeros(3)})
    assert server.ranks.served == {}


def test_what_is_sent_is_checked_before_the_ranks_are_told(server: DiskServer) -> None:
    id = server.post("/updates").json()["id"]
    tensor = {"name": "a", "dtype": "float32", "shape": [2], "offset": 0}
    told = server.post(f"/updates/{id}/inline", n=0, tensors=[tensor], data="AAAA")
    assert (told.status_code, told.json()["detail"]) == (422, "tensor a: expected 8 bytes, found 3")


def test_the_source_survives_the_way_to_the_ranks(server: DiskServer) -> None:
    source = InlineSource("AAAA")
    assert source_from_dict(source.as_dict()) == source
