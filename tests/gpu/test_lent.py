# SPDX-License-Identifier: Apache-2.0
"""Tensors on a GPU that an iterable yields from one buffer, or changes back at its end: what was yielded is what goes out."""

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.serve import tensors
from vllm_fp8ext.serve.client.lent import Pairs
from vllm_fp8ext.serve.client.transports.ipc.handles import batches, handles
from vllm_fp8ext.serve.client.transports.nccl.buckets import PackingBuffer, buckets
from vllm_fp8ext.serve.tensors import LentPart, tensor_parts
from vllm_fp8ext.update.transports.wire import stored

pytestmark = pytest.mark.gpu

COUNT, SIZE = 6, 1 << 20
DEVICE = torch.device("cuda", 0)
LATE_CYCLES = 200_000_000
"""A tenth of a second: what the stream is given after that is done later than what the host does."""
ARGUMENTS = (
    *("--max-model-len", "512", "--max-num-seqs", "4", "--skip-tokenizer-init", "--enforce-eager"),
    *("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(256 << 20)),
)


@pytest.fixture(params=["default", "own"])
def stream(request: pytest.FixtureRequest) -> Iterator[None]:
    """The default stream is current, or another one."""
    if request.param == "default":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def one_buffer() -> Iterator[tuple[str, Tensor]]:
    """Written late, and overwritten when more is asked for."""
    buffer = torch.empty(SIZE, device=DEVICE)
    for n in range(COUNT):
        torch.cuda._sleep(LATE_CYCLES)
        yield f"w{n}", buffer.fill_(n)
        buffer.fill_(-1)


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("most", [0, 256 << 20])
def test_into_the_body_of_a_request(
    stream: None, most: int, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept where the iterable is advanced, or, for an event loop, in a thread; fetched in another one."""
    monkeypatch.setattr(tensors, "MOST_PINNED_BYTES", most)
    pairs = Pairs(one_buffer())
    collected = []
    with ThreadPoolExecutor(1) as other:
        for part in tensor_parts(pairs, ["float32"], lent=pairs.lent):
            assert isinstance(part, LentPart)
            if in_thread:
                other.submit(part.keep).result()
            else:
                part.keep()
            collected.append(other.submit(lambda part: b"".join(part.fetched().pieces()), part))
        bodies = [torch.frombuffer(bytearray(body.result()), dtype=torch.float32) for body in collected]
    assert [body.unique().tolist() for body in bodies] == [[n] for n in range(COUNT)]


def test_the_host_does_not_wait_for_a_copy() -> None:
    part = LentPart(
        "w", "F32", (SIZE,), 4 * SIZE, torch.ones(SIZE, device=DEVICE), torch.cuda.current_stream()
    )
    torch.empty(SIZE, pin_memory=True)  # there is room that is page-locked already
    torch.cuda._sleep(10 * LATE_CYCLES)
    part.keep()
    assert not torch.cuda.current_stream().query()
    assert set(part.fetched().data.cast("B").cast("f")) == {1.0}


@pytest.mark.parametrize("limit", [1, 3 * 4 * SIZE, 1 << 30])
def test_by_handles(stream: None, limit: int) -> None:
    """Copies lie side by side; one that is read at once is none."""
    pairs = Pairs(one_buffer())
    collected: list[float] = []
    for group in batches(pairs, limit, pairs.lent):
        told = handles(group, 0)
        assert len(told.allocations) == 1
        collected += [value for _, tensor in group for value in tensor.unique().tolist()]
    assert collected == list(range(COUNT))


def test_into_buckets(stream: None) -> None:
    rooms = [PackingBuffer(DEVICE), PackingBuffer(DEVICE)]
    collected: list[float] = []
    with ThreadPoolExecutor(1) as other:
        for bucket in buckets(one_buffer(), 2 * 4 * SIZE + 100, lambda n, device: rooms[n % 2]):
            data = other.submit(bucket.data).result()
            for part in bucket.listed:
                collected += data[part.offset : part.offset + 4 * SIZE].view(torch.float32).unique().tolist()
    assert collected == list(range(COUNT))


@pytest.fixture(scope="module")
def checkpoints() -> Iterator[tuple[Path, Path]]:
    """Two of one shape."""
    from vllm_fp8ext.bench.generated import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        both = Path(folder) / "early", Path(folder) / "late"
        for seed, path in enumerate(both):
            write_checkpoint(path, "Qwen3-0.6B", seed, "cuda")
        yield both


def lent_one_by_one(model: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    buffer = torch.empty(
        max(tensor.numel() for tensor in model.values()), dtype=torch.bfloat16, device=DEVICE
    )
    for name, tensor in model.items():
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        buffer.fill_(7.0)


def changed_back(model: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    merged = {name: tensor - 1 for name, tensor in model.items()}
    for name, tensor in merged.items():
        tensor.copy_(model[name])
    yield from merged.items()
    for tensor in merged.values():
        tensor.fill_(7.0)


def test_a_server_serves_what_was_yielded(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    """By every way that one GPU is enough for."""
    early, late = checkpoints
    settings = {"allowed_dirs": [str(early.parent)]}
    variables = {"VLLM_DEEP_GEMM_WARMUP": "skip"}
    with (
        Server(
            early, tmp_path / "server.log", arguments=ARGUMENTS, settings=settings, variables=variables
        ) as server,
        server.client() as client,
    ):
        server.wait(400)
        client.load(late)
        wanted = client.digests().digests
        client.rollback()
        model = dict(stored(late, "cuda"))
        ways: list[dict[str, Any]] = [
            {"transport": "ipc"},
            {"transport": "ipc", "chunk_bytes": 1 << 20},
            {"transport": "ipc", "fp8": True},
            {"transport": "http", "chunk_bytes": 8 << 20},
            {"transport": "http", "chunks_in_flight": 1, "checksum": False},
            {"transport": "http", "fp8": True},
        ]
        makers: list[Callable[..., Iterator[tuple[str, Tensor]]]] = [lent_one_by_one, changed_back]
        for way in ways:
            for make in makers:
                client.push(make(model), version="late", **way)
                assert client.digests().digests == wanted, (way, make.__name__)
                client.rollback()
