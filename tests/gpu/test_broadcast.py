# SPDX-License-Identifier: Apache-2.0
"""Broadcasts through NCCL between two GPUs: the rank on the first one, the trainer on the second, in a thread or as a process
that dies. `tests/update/transports/nccl/test_broadcast.py` does the same through Gloo."""

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.runtime.nccl import unique_id
from vllm_fp8ext.serve.client.transports.nccl.buckets import buckets
from vllm_fp8ext.serve.client.transports.nccl.group import Group
from vllm_fp8ext.update.transports.nccl.group import join
from vllm_fp8ext.update.transports.nccl.message import BroadcastSource, broadcast_tensor
from vllm_fp8ext.update.transports.nccl.receiver import BroadcastReceiver
from vllm_fp8ext.update.transports.receiver import RankDevice

pytestmark = pytest.mark.gpu

RANK, TRAINER = torch.device("cuda:0"), torch.device("cuda:1")
URL = "http://127.0.0.1:1"
SECONDS = 10.0
"""How long the rank waits."""


def wanted() -> None:
    """It always is."""


@pytest.fixture(autouse=True)
def on_a_stream_of_its_own() -> Iterator[None]:
    """As a rank's thread for staging is; afterwards nothing may run on any GPU."""
    torch.cuda.set_device(RANK)
    with torch.cuda.stream(torch.cuda.Stream(RANK)):
        yield
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


@pytest.fixture
def receiver() -> Iterator[BroadcastReceiver]:
    result = BroadcastReceiver(RankDevice(0, RANK))
    yield result
    result._leave("")


@pytest.fixture
def group() -> Iterator[Group]:
    with Group(seconds=SECONDS) as result:
        yield result


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "it takes for ever"
        time.sleep(0.001)


def announced(group: Group, n: int, tensors: dict[str, Tensor]) -> tuple[BroadcastSource, list[Any], Tensor]:
    """A bucket that is packed: what a rank is told of it, its tensors, its bytes."""
    device = next(iter(tensors.values())).device
    room = group.room({URL: 1}, n, device)
    [bucket] = buckets(tensors.items(), 4 << 30, lambda *_: room)
    place, data = group.meet({URL: 1}, device)[URL], bucket.data()
    source = BroadcastSource(**dict(place), bytes=bucket.bytes, mark=bucket.mark.hex(), seconds=SECONDS)
    return source, [broadcast_tensor(source, **dict(listed)) for listed in bucket.listed], data


def received(receiver: BroadcastReceiver, group: Group, n: int, tensors: dict[str, Tensor]) -> None:
    source, listed, data = announced(group, n, tensors)
    failures: list[BaseException] = []

    def send() -> None:
        try:
            until(group.joined)
            group.begin(data)
            until(group.done)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with torch.inference_mode(), receiver.receive(source, wanted) as bucket:
            for tensor in listed:
                wanted_bytes = tensors[tensor.spec.name].contiguous().view(-1).view(torch.uint8)
                result = bucket.read(tensor)
                assert result.device == RANK
                assert torch.equal(result.reshape(-1).view(torch.uint8), wanted_bytes.to(RANK))
    finally:
        thread.join()
    assert failures == []


def refused(
    receiver: BroadcastReceiver, source: BroadcastSource, asked: Callable[[], None] = wanted
) -> UpdateError:
    """How the rank gives up, in time, and with nothing left on its GPU."""
    begun = time.monotonic()
    with pytest.raises(UpdateError) as error, receiver.receive(source, asked):
        pass
    torch.cuda.synchronize(RANK)
    assert time.monotonic() < begun + 2 * SECONDS
    return error.value


@pytest.mark.multigpu
def test_what_is_sent_is_received(receiver: BroadcastReceiver, group: Group) -> None:
    """Small and large buckets through one group, of every dtype."""
    weight = torch.randn(8192, 65_536, device=TRAINER).bfloat16()
    seen: set[int] = set()
    codes = torch.randn(300, 128, device=TRAINER).to(torch.float8_e4m3fn)
    for n, tensors in enumerate(
        [
            {"a": torch.randn(7, 5, device=TRAINER), "codes": codes},
            {"weight": weight},
            {"weight": -weight, "a": torch.randn(3, device=TRAINER)},
            {"a": torch.randn(2, device=TRAINER)},
        ]
    ):
        received(receiver, group, n, tensors)
        seen.add(id(receiver._group))
    assert len(seen) == 1
    group.close()
    received(receiver, group, 0, {"a": torch.randn(9, device=TRAINER)})


@pytest.mark.multigpu
def test_a_trainer_that_never_sends(receiver: BroadcastReceiver, group: Group) -> None:
    """The kernel that waits on the rank's GPU ends; the next group works."""
    source, _, _ = announced(group, 0, {"a": torch.ones(1 << 20, device=TRAINER)})
    joining = threading.Thread(target=until, args=(group.joined,))
    joining.start()
    error = refused(receiver, source)
    assert error.kind == "transfer-timeout"
    assert "no bucket of" in str(error)
    joining.join()
    assert "failed before" in str(refused(receiver, source))
    group.close()
    received(receiver, group, 0, {"a": torch.randn(9, device=TRAINER)})


@pytest.mark.multigpu
def test_tensors_that_nobody_wants_any_more(receiver: BroadcastReceiver, group: Group) -> None:
    source, _, _ = announced(group, 0, {"a": torch.ones(1 << 20, device=TRAINER)})
    joining = threading.Thread(target=until, args=(group.joined,))
    joining.start()
    soon = time.monotonic() + 3

    def not_for_long() -> None:
        if time.monotonic() > soon:
            raise UpdateError("wrong-state", "given up")

    assert refused(receiver, source, not_for_long).kind == "wrong-state"
    joining.join()


DYING = """
import json, os, sys, time, torch
from functools import partial
from vllm_fp8ext.serve.client.transports.nccl.buckets import buckets
from vllm_fp8ext.serve.client.transports.nccl.group import Group

device, group, ranks = torch.device("cuda:1"), Group(), {"http://127.0.0.1:1": 1}
[bucket] = buckets([("a", torch.ones(1 << 30, device=device))], 8 << 30, partial(group.room, ranks))
place, data = group.meet(ranks, device)["http://127.0.0.1:1"], bucket.data()
print(json.dumps({**place.model_dump(), "bytes": bucket.bytes, "mark": bucket.mark.hex()}), flush=True)
while not group.joined():
    time.sleep(0.001)
if sys.argv[1] != "joined":
    group.begin(data)
    time.sleep(float(sys.argv[1]))
os._exit(9)
"""


@pytest.mark.multigpu
@pytest.mark.parametrize("when", ["joined", "0", "0.002"])
def test_a_trainer_that_dies(receiver: BroadcastReceiver, group: Group, when: str) -> None:
    """Once it has joined, or while it sends 4 GiB (which may have come all the same)."""
    with subprocess.Popen([sys.executable, "-c", DYING, when], stdout=subprocess.PIPE) as process:
        assert process.stdout
        source = BroadcastSource(**json.loads(process.stdout.readline()), seconds=SECONDS)
        begun = time.monotonic()
        try:
            with receiver.receive(source, wanted):
                assert when != "joined"
        except UpdateError as error:
            assert error.kind in ("transfer-timeout", "transfer-failed")  # noqa: PT017  it need not fail
        assert time.monotonic() < begun + 3 * SECONDS
        torch.cuda.synchronize(RANK)
    received(receiver, group, 0, {"a": torch.randn(9, device=TRAINER)})


def test_others_that_never_come(receiver: BroadcastReceiver) -> None:
    id = base64.b64encode(unique_id()).decode()
    error = refused(receiver, BroadcastSource("nccl", id, 2, 1, 1024, "00" * 8, 3.0))
    assert error.kind == "transfer-timeout"
    assert "not all 2 processes" in str(error)
    assert torch.ones(3, device=RANK).sum() == 3


def test_two_ranks_on_one_gpu_are_refused(receiver: BroadcastReceiver) -> None:
    """By NCCL. (CUDA IPC is for that.)"""
    id = base64.b64encode(unique_id()).decode()
    other = join("nccl", id, 2, 0, RANK, SECONDS)
    try:
        error = refused(receiver, BroadcastSource("nccl", id, 2, 1, 1024, "00" * 8, SECONDS))
    finally:
        other.close()
    assert error.kind == "transfer-failed"
