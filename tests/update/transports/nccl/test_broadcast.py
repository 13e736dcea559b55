# SPDX-License-Identifier: Apache-2.0
"""A rank that receives what a trainer broadcasts, through Gloo: the trainer in a thread, or as a process that dies."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client.transports.nccl.buckets import buckets
from vllm_fp8ext.serve.client.transports.nccl.group import Group
from vllm_fp8ext.update.transports.nccl import group
from vllm_fp8ext.update.transports.nccl.message import BroadcastSource, broadcast_tensor
from vllm_fp8ext.update.transports.nccl.receiver import BroadcastReceiver
from vllm_fp8ext.update.transports.receiver import RankDevice

CPU = torch.device("cpu")
URL = "http://127.0.0.1:1"
SECONDS = 3.0
"""How long the rank waits for what never comes."""
LONGEST = SECONDS + 20
"""How long it waits for what comes, and how long anything may take on a busy machine."""


def test_a_kept_group_is_that_which_its_servers_name() -> None:
    """One that was started anew names none, one that another push went to another one."""
    with Group() as group:
        group.confirm([None])
        first = group.meet({URL: 1}, CPU)[URL]
        group.confirm([first.id])
        assert group.meet({URL: 1}, CPU)[URL] == first
        for told in ([None], ["another"], [first.id, "another"]):
            group.confirm(told)
            then = group.meet({URL: 1}, CPU)[URL]
            assert then != first
            first = then


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_group_is_met_at_the_address_that_it_names_alone(host: str) -> None:
    """Whoever reaches its store may take part."""
    with Group(host=host) as group:
        place = group.meet({URL: 1}, CPU)[URL].id
        port = int(place.partition("/")[0].rpartition(":")[2])
        socket.create_connection((host, port), 20).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), 20)


class Trainer:
    """Sends tensors through one group."""

    def __init__(self) -> None:
        self.group = Group(seconds=LONGEST)
        self.count = 0

    def announce(
        self, seconds: float = LONGEST, **tensors: Tensor
    ) -> tuple[BroadcastSource, list[Any], Tensor]:
        """A bucket that is packed: what a rank is told of it, its tensors, its bytes."""
        n, self.count = self.count, self.count + 1
        room = self.group.room({URL: 1}, n, CPU)
        [bucket] = buckets(tensors.items(), 1 << 30, lambda *_: room)
        place, data = self.group.meet({URL: 1}, CPU)[URL], bucket.data()
        source = BroadcastSource(**dict(place), bytes=bucket.bytes, mark=bucket.mark.hex(), seconds=seconds)
        return source, [broadcast_tensor(source, **dict(listed)) for listed in bucket.listed], data

    @contextmanager
    def sending(self, data: Tensor) -> Iterator[None]:
        """Broadcast, meanwhile."""

        def send() -> None:
            _until(self.group.joined)
            self.group.begin(data)
            _until(self.group.done)

        thread = threading.Thread(target=send)
        thread.start()
        yield
        thread.join(LONGEST)
        assert not thread.is_alive()


def _until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.005)


@pytest.fixture(scope="module", autouse=True)
def nobody_waits_any_more() -> Iterator[None]:
    """A thread that is still in Gloo's code when the interpreter ends would abort it."""
    before = threading.enumerate()
    yield
    for thread in set(threading.enumerate()).difference(before):
        thread.join(2 * LONGEST)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    result = Trainer()
    yield result
    result.group.close()


@pytest.fixture
def receiver() -> BroadcastReceiver:
    return BroadcastReceiver(RankDevice(0, CPU))


def wanted() -> None:
    """It always is."""


def received(receiver: BroadcastReceiver, trainer: Trainer, **tensors: Tensor) -> int:
    """Broadcast tensors and compare what came; the address of the rank's buffer."""
    source, listed, data = trainer.announce(**tensors)
    with trainer.sending(data), torch.inference_mode(), receiver.receive(source, wanted) as bucket:
        result = {tensor.spec.name: bucket.read(tensor) for tensor in listed}
        assert list(result) == list(tensors)
        for name, tensor in tensors.items():
            assert result[name].dtype == tensor.dtype
            assert torch.equal(result[name].float(), tensor.float())
        return min(tensor.data_ptr() for tensor in result.values())


def refused(
    receiver: BroadcastReceiver, source: BroadcastSource, asked: Callable[[], None] = wanted
) -> UpdateError:
    """How the rank gives up, and that it does in time."""
    begun = time.monotonic()
    with pytest.raises(UpdateError) as error, receiver.receive(source, asked):
        pass
    assert time.monotonic() < begun + LONGEST
    return error.value


def test_what_is_sent_is_received(receiver: BroadcastReceiver, trainer: Trainer) -> None:
    """Of any dtype and shape; in one buffer and one group as long as they do."""
    codes = torch.randn(3, 128).to(torch.float8_e4m3fn)
    first = received(receiver, trainer, a=torch.randn(7, 5), b=torch.randn(33).bfloat16(), c=codes)
    joined = receiver._group
    assert received(receiver, trainer, a=torch.randn(3, 2).half().t(), b=torch.ones(())) == first
    received(receiver, trainer, a=torch.zeros(0, 4), big=torch.randn(1000, 100))
    assert receiver._group is joined
    trainer.group.close()
    received(receiver, trainer, a=torch.randn(2))
    assert receiver._group is not joined


def test_a_trainer_that_never_joins(receiver: BroadcastReceiver, trainer: Trainer) -> None:
    source, _, _ = trainer.announce(SECONDS, a=torch.ones(2))
    error = refused(receiver, source)
    assert error.kind == "transfer-timeout"
    assert "not all 2 processes of the group came within 3 s" in str(error)
    error = refused(receiver, replace(source, seconds=2 * LONGEST))
    assert error.kind == "transfer-failed"
    assert "this group failed before" in str(error)
    trainer.group.close()
    received(receiver, trainer, a=torch.randn(2))


def test_a_trainer_that_never_sends(receiver: BroadcastReceiver, trainer: Trainer) -> None:
    source, _, _ = trainer.announce(SECONDS, a=torch.ones(2))
    joining = threading.Thread(target=_until, args=(trainer.group.joined,))
    joining.start()
    error = refused(receiver, source)
    assert error.kind == "transfer-timeout"
    assert f"no bucket of {source.bytes} bytes came within 3 s" in str(error)
    joining.join()
    trainer.group.close()
    received(receiver, trainer, a=torch.randn(2))


def test_nobody_where_the_trainer_should_be(receiver: BroadcastReceiver, trainer: Trainer) -> None:
    source, _, _ = trainer.announce(SECONDS, a=torch.ones(2))
    trainer.group.close()
    assert refused(receiver, source).kind in ("transfer-timeout", "transfer-failed")


def test_tensors_that_nobody_wants_any_more(receiver: BroadcastReceiver, trainer: Trainer) -> None:
    """They are not waited for; and as the trainer may have sent them, the group is left."""
    source, _, _ = trainer.announce(2 * LONGEST, a=torch.ones(2))

    def never() -> None:
        raise UpdateError("wrong-state", "given up")

    assert refused(receiver, source, never).kind == "wrong-state"
    assert refused(receiver, source).kind == "transfer-failed"
    trainer.group.close()
    source, _, _ = trainer.announce(2 * LONGEST, a=torch.ones(2))
    soon = time.monotonic() + 0.3

    def not_for_long() -> None:
        if time.monotonic() > soon:
            never()

    assert refused(receiver, source, not_for_long).kind == "wrong-state"


@pytest.mark.parametrize("place", ["nobody joins", "nobody listens"])
def test_no_thread_waits_for_what_was_given_up(
    receiver: BroadcastReceiver, trainer: Trainer, place: str
) -> None:
    """Whatever time there would have been for it."""
    before = set(threading.enumerate())
    source, _, _ = trainer.announce(100 * LONGEST, a=torch.ones(2))
    if place == "nobody listens":
        trainer.group.close()
    soon = time.monotonic() + 0.3

    def not_for_long() -> None:
        if time.monotonic() > soon:
            raise UpdateError("wrong-state", "given up")

    assert refused(receiver, source, not_for_long).kind == "wrong-state"
    for thread in set(threading.enumerate()).difference(before):
        thread.join(LONGEST)
        assert not thread.is_alive()


def given_up(place: str) -> group.GlooGroup:
    """The trainer's membership of a group that a rank has left, for which a bucket was on its way."""
    sender, receiver = (group.GlooGroup(place, 2, rank, LONGEST) for rank in (0, 1))
    _until(sender.joined)
    _until(receiver.joined)
    receiver.begin(torch.zeros(8, dtype=torch.uint8))
    receiver.close()
    return sender


def test_groups_that_were_given_up_and_have_not_ended_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer joins and never sends: nothing but its leaving breaks that off before the time is over."""
    monkeypatch.setattr(group, "_LINGERING", 2)
    monkeypatch.setattr(group.GlooGroup, "_lingering", set())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    senders = [given_up(f"127.0.0.1:{store.port}/{name}") for name in ("a", "b")]
    with pytest.raises(UpdateError, match="2 groups that were given up have not ended") as refusal:
        given_up(f"127.0.0.1:{store.port}/c")
    assert refusal.value.kind == "transfer-failed"
    senders.clear()
    for thread in list(group.GlooGroup._lingering):
        thread.join(LONGEST)
        assert not thread.is_alive()
    given_up(f"127.0.0.1:{store.port}/c")


def test_another_bucket_than_was_told(receiver: BroadcastReceiver, trainer: Trainer) -> None:
    """One that the trainer sent and the rank never waited for, say."""
    _, _, lost = trainer.announce(a=torch.ones(2))
    source, _, _ = trainer.announce(a=torch.zeros(2))
    with trainer.sending(lost):
        error = refused(receiver, source)
    assert error.kind == "transfer-failed"
    assert "another bucket came than was announced" in str(error)


DYING = """
import json, os, sys, time, torch
from functools import partial
from vllm_fp8ext.serve.client.transports.nccl.buckets import buckets
from vllm_fp8ext.serve.client.transports.nccl.group import Group

group, ranks = Group(), {"http://127.0.0.1:1": 1}
[bucket] = buckets([("a", torch.ones(64 << 20))], 1 << 30, partial(group.room, ranks))
place, data = group.meet(ranks, bucket.device)["http://127.0.0.1:1"], bucket.data()
print(json.dumps({**place.model_dump(), "bytes": bucket.bytes, "mark": bucket.mark.hex()}), flush=True)
while not group.joined():
    time.sleep(0.01)
group.begin(data)
time.sleep(float(sys.argv[1]))
os._exit(9)
"""


@pytest.mark.parametrize("seconds", [0, 0.01])
def test_a_trainer_that_dies_while_it_sends(
    receiver: BroadcastReceiver, trainer: Trainer, seconds: float
) -> None:
    line = [sys.executable, "-c", DYING, str(seconds)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout
        source = BroadcastSource(**json.loads(process.stdout.readline()), seconds=SECONDS)
        assert refused(receiver, source).kind in ("transfer-timeout", "transfer-failed")
    received(receiver, trainer, a=torch.randn(2))
