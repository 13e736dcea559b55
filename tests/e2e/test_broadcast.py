# SPDX-License-Identifier: Apache-2.0
"""Updates that are broadcast to the ranks, through Gloo: the same way as through NCCL, on the CPU."""

import base64
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import Group, ReplicasPushOptions, calls
from vllm_fp8ext.serve.client.driver import BlockingDriver
from vllm_fp8ext.serve.client.flow import Endpoint
from vllm_fp8ext.serve.client.replicas import push_everywhere
from vllm_fp8ext.serve.schema import BroadcastGroup, DenseTensor, Receive, Update
from vllm_fp8ext.update.transports.nccl.group import join

from .ask import state
from .conftest import FIRST, PATIENCE_SECONDS, SECOND, on_early

NORM = "model.norm.weight"
LONGEST = PATIENCE_SECONDS + 30
"""Seconds until a rank has given a broadcast up, on a busy machine."""


@pytest.fixture(scope="module")
def late() -> dict[str, Tensor]:
    return load_file(LATE / "model.safetensors")


@pytest.fixture
def store() -> TCPStore:
    """What a trainer runs for Gloo."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def told(store: TCPStore, server: Server, name: str = "a", **more: Any) -> Receive:
    """An announcement of one tensor."""
    with server.client() as client:
        size = 1 + client.manifest()["world_size"]
    group = BroadcastGroup(backend="gloo", id=f"127.0.0.1:{store.port}/{name}", size=size, first_rank=1)
    tensor = DenseTensor(name=NORM, dtype="bfloat16", shape=[256], offset=0)
    body = Receive(n=0, group=group, bytes=520, mark="00" * 8, tensors=[tensor])
    return body.model_copy(update=more)


def ended(server: Server, id: str) -> Update:
    """The update once its chunks have been staged or refused."""
    deadline = time.monotonic() + LONGEST
    with server.client() as client:
        while True:
            update = client.update(id)
            if not any(chunk.busy for chunk in update.chunks.values()):
                return update
            assert time.monotonic() < deadline, "a chunk waits for ever"
            time.sleep(0.05)


def test_the_same_bytes_are_served(server: Server, late: dict[str, Tensor]) -> None:
    """As from the checkpoint on disk; one group for several pushes, in one bucket and in many."""
    seen = []
    with server.client() as client, Group() as group:
        client.push(LATE, version="late")
        wanted = client.digests().digests
        client.rollback()
        whole = client.push(late, version="late", transport="nccl", group=group)
        assert client.digests().digests == wanted
        assert whole.bytes == sum(tensor.nbytes for tensor in late.values())
        assert list(whole.chunks) == ["0"]
        client.rollback()
        sent = client.push(
            iter(late.items()),
            version="late",
            transport="nccl",
            group=group,
            fp8=True,
            chunk_bytes=1 << 20,
            progress=lambda count, total: seen.append((count, total)),
        )
        assert client.digests().digests == wanted
        assert len(sent.chunks) > 2
        assert len(seen) >= len(sent.chunks)
        assert client.verify().version == "late"
        client.rollback()
        client.push(late, version="late", transport="nccl")  # through one of its own
        assert client.digests().digests == wanted


@pytest.mark.parametrize(
    ("transport", "fp8"),
    [
        ("http", True),
        ("nccl", False),
        pytest.param("http", False, marks=pytest.mark.full),
        pytest.param("nccl", True, marks=pytest.mark.full),
    ],
)
def test_what_was_yielded_is_served(
    single: Server, late: dict[str, Tensor], transport: Any, fp8: bool
) -> None:
    """By a generator that has one buffer, and by one that changes its tensors back at its end."""

    def one_buffer() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(max(tensor.numel() for tensor in late.values()), dtype=torch.bfloat16)
        for name, tensor in late.items():
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
            buffer.fill_(7.0)

    def changed_back() -> Iterator[tuple[str, Tensor]]:
        model = load_file(EARLY / "model.safetensors")
        for name, tensor in model.items():
            tensor.copy_(late[name])
        yield from model.items()
        for name, tensor in load_file(EARLY / "model.safetensors").items():
            model[name].copy_(tensor)

    with single.client() as client, Group() as group:
        client.push(late, version="late")
        wanted = client.digests().digests
        client.rollback()
        options = {"transport": transport, "fp8": fp8, "chunk_bytes": 1 << 20}
        if transport == "nccl":
            options |= {"group": group}
        for make in (one_buffer, changed_back):
            client.push(make(), version="late", **options)
            assert client.digests().digests == wanted
            client.rollback()


@FIRST
def test_groups_that_take_turns(server: Server, late: dict[str, Tensor]) -> None:
    """A rank is in one at a time: a server names it, by which a kept group knows that it is not the one any more."""

    def told() -> str | None:
        opened = client.open()
        client.abandon(opened.id)
        return opened.group

    with server.client() as client, Group() as one, Group() as other:
        seen = []
        for group in (one, other, one, one):
            client.push(late, version="late", transport="nccl", group=group)
            seen.append(told())
    assert None not in seen
    assert len(set(seen[:3])) == 3
    assert seen[3] == seen[2]


def test_one_broadcast_for_two_servers(servers: dict[str, Server], late: dict[str, Tensor]) -> None:
    for server in servers.values():
        on_early(server)
    endpoints = tuple(
        Endpoint.of(server.url, server.key, timeout=60.0, retries=0) for server in servers.values()
    )
    with contextlib.closing(BlockingDriver()) as driver:
        driver.run(push_everywhere(endpoints, LATE, ReplicasPushOptions(version="late")))
        wanted = [driver.run(calls.digests(endpoint)).digests for endpoint in endpoints]
        for endpoint in endpoints:
            driver.run(calls.rollback(endpoint))
        options = ReplicasPushOptions(version="late", transport="nccl", chunk_bytes=1 << 20)
        driver.run(push_everywhere(endpoints, late, options))
        assert [driver.run(calls.digests(endpoint)).digests for endpoint in endpoints] == wanted


@pytest.mark.parametrize(
    ("server", "at"),
    [
        ("tp1", 0),
        ("tp2", 3),
        pytest.param("tp1", 3, marks=pytest.mark.full),
        pytest.param("tp2", 0, marks=pytest.mark.full),
    ],
    indirect=["server"],
)
def test_a_refusal_leaves_everything_as_it_was(server: Server, late: dict[str, Tensor], at: int) -> None:
    """Before the first bucket, and while another one is under way; the same group then serves the next push."""
    before = state(server)
    names = list(late)
    wrong = {**late, names[at * len(names) // 4]: torch.ones(3, 5)}
    options: dict[str, Any] = {"version": "late", "transport": "nccl", "chunk_bytes": 1 << 20}
    with server.client() as client, Group() as group:
        id = f"refused-{server.port}-{at}"
        with pytest.raises(UpdateError) as refused:
            client.push(wrong, group=group, id=id, **options)
        assert (refused.value.kind, refused.value.status) == ("wrong-shape", 422)
        # what was told already is not waited for
        assert {problem["kind"] for problem in ended(server, id).problems} <= {"wrong-state"}
        assert client.weights().update is None
        assert state(server) == before
        client.push(late, group=group, **options)
        assert client.weights().version == "late"


@FIRST
def test_what_is_not_finite_is_found_while_it_is_staged(server: Server, late: dict[str, Tensor]) -> None:
    before = state(server)
    bad = late[NORM].clone()
    bad[7] = float("nan")
    with server.client() as client, pytest.raises(UpdateError, match=NORM) as refused:
        client.push({**late, NORM: bad}, transport="nccl", chunk_bytes=1 << 20)
    assert (refused.value.kind, refused.value.status) == ("non-finite", 422)
    assert state(server) == before


@FIRST
def test_a_trainer_that_never_comes(server: Server, store: TCPStore, late: dict[str, Tensor]) -> None:
    """Its chunk is refused in time, and so is the next one of that group, at once. Requests are answered meanwhile."""
    before = state(server)
    with server.client() as client:
        id = client.open().id
        update = client.receive(id, told(store, server))
        assert update.chunks["0"].busy
        with pytest.raises(UpdateError) as refused:
            client.prepare(id)
        assert refused.value.kind == "staging"
        assert state(server) == before
        update = ended(server, id)
        assert [problem["kind"] for problem in update.problems] == ["transfer-timeout"]
        assert not update.chunks["0"].staged
        client.receive(id, told(store, server))
        [problem] = ended(server, id).problems
        assert problem["kind"] == "transfer-failed"
        assert "failed before" in problem["detail"]
        # the update goes on in another way
        whole = (LATE / "model.safetensors").read_bytes()
        client.put_chunk(id, 0, whole, len(whole))
        client.abandon(id)
        assert state(server) == before
        client.push(late, version="late", transport="nccl")


@SECOND
def test_an_update_that_is_given_up_is_not_waited_for(
    server: Server, store: TCPStore, late: dict[str, Tensor]
) -> None:
    with server.client() as client:
        for name in "ab":
            id = client.open().id
            client.receive(id, told(store, server, name))
            client.abandon(id)
            assert [problem["kind"] for problem in ended(server, id).problems] == ["wrong-state"]
        client.push(late, version="late", transport="nccl")


DYING = """
import os, sys, torch
from safetensors.torch import load_file
from vllm_fp8ext.serve.client import Client, Group

class Mortal(Group):
    def begin(self, data):
        self.count = getattr(self, "count", 0) + 1
        if self.count == int(sys.argv[4]):
            os._exit(9)
        super().begin(data)

with Client(sys.argv[1], sys.argv[2]) as client, Mortal() as group:
    client.push(load_file(sys.argv[3]), id=sys.argv[5], transport="nccl", group=group, chunk_bytes=1 << 20)
"""


@FIRST
def test_a_push_that_was_interrupted_goes_on(
    server: Server, store: TCPStore, late: dict[str, Tensor]
) -> None:
    """Though the ranks still wait for what it has told them."""
    with server.client() as client:
        id = client.open(version="late").id
        assert client.receive(id, told(store, server)).chunks["0"].busy
        assert client.push(late, version="late", transport="nccl", id=id).state == "committed"


@SECOND
@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_trainer_that_dies(server: Server, late: dict[str, Tensor], at: int) -> None:
    """When a bucket of its was announced; the first, and a later one."""
    before, id = state(server), f"dying-{server.port}-{at}"
    with server.client() as client:
        weights = str(LATE / "model.safetensors")
        line = [sys.executable, "-c", DYING, server.url, server.key, weights, str(at), id]
        assert subprocess.run(line, cwd="/").returncode == 9
        assert state(server) == before
        update = ended(server, id)
        assert {problem["kind"] for problem in update.problems} <= {"transfer-failed", "transfer-timeout"}
        assert update.problems
        client.abandon(id)
        client.push(late, version="late", transport="nccl")


def test_another_bucket_than_was_announced(single: Server, store: TCPStore) -> None:
    """Ranks that have fallen out of step do not take one for the other."""
    body = told(store, single, "step")
    with single.client() as client:
        id = client.open().id
        client.receive(id, body)
        group = join("gloo", body.group.id, 2, 0, torch.device("cpu"), 60.0)
        while not group.joined():
            time.sleep(0.01)
        group.begin(torch.ones(520, dtype=torch.uint8))
        while not group.done():
            time.sleep(0.01)
        update = ended(single, id)
        assert [problem["kind"] for problem in update.problems] == ["transfer-failed"]
        assert "another bucket" in update.problems[0]["detail"]
        client.abandon(id)
        group.close()


def test_what_is_refused_before_anybody_waits(single: Server, store: TCPStore) -> None:
    body = told(store, single)
    tensor = body.tensors[0]
    cases: dict[str, dict[str, Any]] = {
        "invalid-request": {"tensors": [tensor.model_copy(update={"offset": 2})]},
        "wrong-dtype": {"tensors": [tensor.model_copy(update={"dtype": "int8"})]},
        "unknown-tensor": {"tensors": [tensor.model_copy(update={"name": "stranger"})]},
        "wrong-shape": {"tensors": [tensor.model_copy(update={"shape": [255]})]},
        "chunk-too-large": {"bytes": 1 << 40},
    }
    groups = {
        "has no ranks 2 to 2": {"first_rank": 2},
        "expected host:port/name": {"id": "nowhere"},
        "expected 128 bytes in base64": {"backend": "nccl"},
    }
    with single.client() as client:
        with pytest.raises(UpdateError) as refused:
            client.receive("nobody", body)
        assert refused.value.kind == "unknown-update"
        opened = client.open()
        assert opened.max_receive_bytes == 1 << 30
        for kind, changes in cases.items():
            with pytest.raises(UpdateError) as refused:
                client.receive(opened.id, body.model_copy(update=changes))
            assert refused.value.kind == kind
        for message, changes in groups.items():
            group = body.group.model_copy(update=changes)
            with pytest.raises(UpdateError, match=message) as refused:
                client.receive(opened.id, body.model_copy(update={"group": group}))
            assert (refused.value.kind, refused.value.status) == ("invalid-request", 422)
        assert client.update(opened.id).chunks == {}
        client.abandon(opened.id)


def test_nccl_needs_gpus(single: Server, store: TCPStore) -> None:
    """Told by the chunk, as everything that only the ranks can find out."""
    body = told(store, single)
    id = base64.b64encode(bytes(128)).decode()
    group = body.group.model_copy(update={"backend": "nccl", "id": id})
    with single.client() as client:
        update = client.open()
        client.receive(update.id, body.model_copy(update={"group": group}))
        [problem] = ended(single, update.id).problems
        assert problem["kind"] == "transfer-failed"
        assert "expected backend gloo on device cpu, found nccl" in problem["detail"]
        client.abandon(update.id)
