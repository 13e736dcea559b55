# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of transports: the same bytes moved, with nothing else done to them. Measured beside updates, in turns.

`http`: the checkpoint's chunks, as `push` makes them, are read and PUT to a handler that drops them, one after the other and
as many at a time as `push` sends, of which the faster counts: an ASGI application of a few lines under uvicorn, in a process
of its own, without vLLM; no checksums. Then, with a GPU, as many bytes are copied to it from page-locked memory. `files`: the
checkpoint is read by as many threads as a rank has, into memory that is used again, page-locked with a GPU.
"""

import contextlib
import multiprocessing
import os
import queue
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from vllm_fp8ext.serve.client import CHUNK_BYTES, CHUNKS_IN_FLIGHT
from vllm_fp8ext.serve.safetensors_body import SafetensorsBody, bodies
from vllm_fp8ext.serve.safetensors_file import ranges_of
from vllm_fp8ext.update.contract.checkpoint_files import checkpoint_files

COPY_BYTES = 256 << 20
"""Bytes of one copy to the GPU."""


class Bare:
    """A baseline: each of `moves`, by the number of its threads, brings a checkpoint's bytes over, and returns how many these
    are."""

    def __init__(self, moves: Mapping[int, Callable[[Path], int]]) -> None:
        self._moves = moves
        self._samples: dict[int, list[dict[str, float]]] = {threads: [] for threads in moves}

    def __call__(self, checkpoint: Path) -> None:
        """Measure each once."""
        for threads, move in self._moves.items():
            start = time.monotonic()
            size = move(checkpoint)
            self._samples[threads].append({"seconds": time.monotonic() - start, "bytes": float(size)})

    def case(self, model: str, transport: str) -> dict[str, Any]:
        """Return the measurements of the number of threads that is fastest at the median."""
        medians = {
            threads: statistics.median(sample["seconds"] for sample in samples)
            for threads, samples in self._samples.items()
        }
        threads = min(medians, key=lambda threads: medians[threads])
        samples = self._samples[threads]
        return {
            "model": model,
            "transport": transport,
            "variant": "bare",
            "load": 0,
            "threads": threads,
            "seconds_by_threads": medians,
            "total_seconds": medians[threads],
            "first_seconds": samples[0]["seconds"],
            "bytes": samples[0]["bytes"],
            "samples": samples,
        }


@contextlib.contextmanager
def baseline(transport: str) -> Iterator[Bare | None]:
    """The baseline of a transport, ready to be measured; None where there is none."""
    if transport in ("http", "http-plain"):
        copy = _copier()
        with _dropping() as port:

            def move(threads: int, checkpoint: Path) -> int:
                return copy(_upload(port, threads, checkpoint))

            yield Bare({threads: partial(move, threads) for threads in (1, CHUNKS_IN_FLIGHT)})
    elif transport == "files":
        from vllm_fp8ext.update.transports.read_ahead import READERS

        yield Bare({READERS: _reader(READERS)})
    else:
        yield None


def _upload(port: int, threads: int, checkpoint: Path) -> int:
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(partial(_put, port), bodies(ranges_of(checkpoint), CHUNK_BYTES)))


def _put(port: int, body: SafetensorsBody) -> int:
    with contextlib.closing(HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("PUT", "/", body, {"Content-Length": str(body.length)})
        answer = connection.getresponse()
        received = int(answer.read())
    if received != body.length:
        raise RuntimeError(f"the bare handler received {received} bytes of {body.length}")
    return received


@contextlib.contextmanager
def _dropping() -> Iterator[int]:
    """A server that reads and drops bodies, in a process of its own; its port on this machine."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        port: int = listening.getsockname()[1]
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(listening,), daemon=True)
        process.start()
    try:
        with contextlib.closing(HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("PUT", "/", b"")
            connection.getresponse().read()  # it is up
        yield port
    finally:
        process.terminate()
        process.join()


def _serve(listening: socket.socket) -> None:
    import uvicorn

    # Freeing it teaches glibc to keep what is freed, as the imports of vLLM do in a server. Else it gives each piece of a
    # body back to the kernel, and faults its pages in again: half of the rate.
    bytearray(16 << 20)
    uvicorn.Server(uvicorn.Config(_drop, log_level="warning", lifespan="off")).run(sockets=[listening])


async def _drop(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that answers with the number of bytes in the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    text = str(size).encode()
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def _copier() -> Callable[[int], int]:
    """Copies so many bytes to the GPU, if there is one."""
    import torch

    if not torch.cuda.is_available():
        return lambda size: size
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")

    def copy(size: int) -> int:
        for start in range(0, size, COPY_BYTES):
            count = min(COPY_BYTES, size - start)
            device[:count].copy_(host[:count], non_blocking=True)
        torch.cuda.synchronize()
        return size

    return copy


def _reader(threads: int) -> Callable[[Path], int]:
    """Reads every safetensors file of a folder, some megabytes at a time; returns their bytes."""
    import torch

    from vllm_fp8ext.update.transports.read_ahead import READ_BYTES

    pinned = torch.cuda.is_available()
    buffers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(torch.empty(READ_BYTES, dtype=torch.uint8, pin_memory=pinned).numpy()))

    def piece(descriptor: int, start: int, stop: int) -> None:
        buffer = buffers.get()
        while start < stop:
            count = os.preadv(descriptor, [buffer[: stop - start]], start)
            if not count:
                raise RuntimeError("a checkpoint became shorter while it was read")
            start += count
        buffers.put(buffer)

    def read(checkpoint: Path) -> int:
        total = 0
        for file in checkpoint_files(checkpoint):
            with file.open("rb") as opened, ThreadPoolExecutor(threads) as pool:
                size = os.fstat(opened.fileno()).st_size
                starts = range(0, size, READ_BYTES)
                reads = [
                    pool.submit(piece, opened.fileno(), start, min(start + READ_BYTES, size))
                    for start in starts
                ]
                for done in reads:
                    done.result()
            total += size
        return total

    return read
