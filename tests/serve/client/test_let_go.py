# SPDX-License-Identifier: Apache-2.0
"""Tensors that are made one by one: how many of them are there at the same time, on a GPU that a server may share."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.serve.client.everywhere import on_one
from vllm_fp8ext.serve.client.flow import Endpoint, Work
from vllm_fp8ext.serve.client.lent import Pairs
from vllm_fp8ext.serve.client.progress import Counter
from vllm_fp8ext.serve.client.source import ChunkSource, Tensors
from vllm_fp8ext.serve.client.transports.ipc import handles, sender
from vllm_fp8ext.serve.client.transports.nccl import broadcast, buckets
from vllm_fp8ext.serve.client.transports.nccl.buckets import PackingBuffer
from vllm_fp8ext.serve.tensors import tensor_parts

EACH, BYTES = 4, 64
"""Tensors in a chunk, bytes of one."""


class Made:
    """Makes tensors, and notes how many of them were alive at most."""

    def __init__(self) -> None:
        self.most = 0
        self._made: list[weakref.ref[Tensor]] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for n in range(4 * EACH):
            tensor = torch.ones(BYTES // 4)
            self._made.append(weakref.ref(tensor))
            self.most = max(self.most, sum(made() is not None for made in self._made))
            yield f"w{n}", tensor
            del tensor


def steps(flow: Any) -> None:
    """Take the steps of a flow that asks no server."""
    try:
        step = next(flow)
        while True:
            assert isinstance(step, Work)
            step = flow.send(step.function())
    except StopIteration:
        pass


def nothing(*_: Any, **__: Any) -> Iterator[Any]:
    yield from ()


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are as good as a GPU's."""
    for module in (buckets, handles):
        monkeypatch.setattr(module, "torch_tensor", lambda name, tensor, *devices: tensor)


def test_chunks() -> None:
    """Over HTTP: copied, and let go of before the next one is made."""
    made = Made()
    pairs = Pairs(made)
    source = ChunkSource(tensor_parts(pairs, ["float32"], lent=pairs.lent))
    for each in source.chunks(EACH * BYTES):
        if isinstance(each, Work):
            each.function()
    assert made.most == 1


@pytest.mark.parametrize("lent", [True, False])
def test_handles(monkeypatch: pytest.MonkeyPatch, lent: bool) -> None:
    """What is lent is copied, and let go of before the next one is made."""
    monkeypatch.setattr(sender, "handles", lambda group, n: None)
    monkeypatch.setattr(sender.calls, "handles", nothing)
    made = Made()
    endpoint = Endpoint.of("http://a", None, timeout=1.0, retries=0)
    update: Any = SimpleNamespace(id="u", chunks={})
    pairs = Pairs(made, lending=lent)
    tensors = Tensors(pairs, pairs.lent, complete=False)
    steps(sender.IpcSender(tensors, EACH * BYTES, None).send({endpoint: update}, on_one))
    assert made.most <= (1 if lent else EACH + 1)


def test_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_until", "_tried", "_staged"):
        monkeypatch.setattr(broadcast, name, nothing)
    group: Any = SimpleNamespace(
        confirm=lambda groups: None,
        meet=lambda ranks, device: {},
        room=lambda ranks, n, device: PackingBuffer(torch.device("cpu")),
        joined=None,
        done=None,
        begin=lambda data: None,
        seconds=1.0,
    )
    servers: Any = SimpleNamespace(updates={}, each=nothing)
    made = Made()
    limit = EACH * BYTES + buckets.MARK_BYTES
    steps(broadcast._broadcast(servers, made, limit, group, Counter(None, None)))
    assert made.most == 1
