# SPDX-License-Identifier: Apache-2.0
"""A trainer's side of workers that take buckets in one long call: what veRL and checkpoint-engine do in their own process.

As a program it is a trainer that is killed half-way. Takes its name, the number of ranks, and a folder for shared memory.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import zmq
from torch import Tensor
from trainer_packages import VERL, buckets, find, shared, without_cuda

GPU = torch.cuda.is_available()
Part = list[tuple[dict[str, Any], Tensor]]


def verl(tensors: Iterable[tuple[str, Tensor]], rank: int) -> None:
    """Send tensors to a worker by veRL's own sender."""
    find(*VERL)
    without_cuda()
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

    async def items(weights: Any) -> Any:
        for each in weights:
            yield each

    sys.modules["verl.workers.rollout.utils"] = type(sys)("verl.workers.rollout.utils")
    sys.modules["verl.workers.rollout.utils"].ensure_async_iterator = items  # type: ignore[attr-defined]  # needs Ray
    job = os.environ["VERL_RAY_JOB_ID"]
    where = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-{rank}.sock"
    made = transfer.BucketedWeightSender(where, bucket_size_mb=1, use_shm=not GPU)
    torch.cuda.set_device(rank) if GPU else None
    asyncio.run(made.async_send_weights(iter(tensors)))


def parts_of(tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[Part], int]:
    """Lay tensors out in three buckets. Returns them, and the bytes of the largest."""

    def laid_out(bucket: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[dict[str, Any], Tensor]]:
        start = 0
        for name, tensor in bucket:
            yield {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": start}, tensor
            start += -(-tensor.nbytes // 256) * 256

    parts = [list(laid_out(bucket)) for bucket in buckets(tensors, 3)]
    return parts, max(spec["offset"] + tensor.nbytes for part in parts for spec, tensor in part)


def checkpoint_engine(parts: Iterable[Part], size: int, rank: int, folder: Path) -> None:
    """Send buckets of at most `size` bytes to a worker as checkpoint-engine's parameter server does."""
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.bind(f"ipc://{folder}/engine-{rank}")

    def say(message: Any) -> None:
        socket.send_pyobj(message)
        answer = socket.recv()
        assert answer == b"", answer.decode()

    buffer, handle = shared(folder / f"buffer-{rank}", torch.zeros(size, dtype=torch.uint8), rank)
    say(handle)
    for part in parts:
        for spec, tensor in part:
            place = buffer[spec["offset"] : spec["offset"] + tensor.nbytes]
            place.copy_(tensor.reshape(-1).view(torch.uint8))
        torch.cuda.synchronize(rank) if GPU else None
        say([spec for spec, _ in part])
    say(None)
    say(None)
    socket.close()


def main(name: str, ranks: int, folder: Path) -> None:
    """Send to all ranks, and die when each has had most of it."""
    from vllm_fp8ext.checkpoints import EARLY
    from vllm_fp8ext.update.transports.wire import stored

    reached = threading.Barrier(ranks)

    def most(items: Sequence[Any], count: int) -> Iterator[Any]:
        yield from items[:count]
        reached.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    tensors = list(stored(EARLY))
    parts, size = parts_of(tensors)

    def send(rank: int) -> None:
        if name == "verl":
            verl(most(tensors, len(tensors) - 1), rank)
        else:
            checkpoint_engine(most(parts, 2), size, rank, folder)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(send, range(ranks)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
