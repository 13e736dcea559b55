# SPDX-License-Identifier: Apache-2.0
"""A trainer that broadcasts checkpoints to a server by NCCL, through one group; prints what came of each, as JSON.

broadcast_scenario.py URL KEY DEVICE WHAT FOLDER [WHAT FOLDER …]

WHAT: `whole`, `parts` (many buckets), `fp8` (many, as codes and scales), `lent` (from one buffer that is overwritten), or
`dies` (as the second bucket is under way).
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.serve.client import Client, Group
from vllm_fp8ext.update.transports.wire import stored

BUCKET = 64 << 20


class Mortal(Group):
    """A group of a process that ends while it sends."""

    begun = 0

    def begin(self, data: Any) -> None:
        super().begin(data)
        self.begun += 1
        if self.begun == 2:
            os._exit(9)


def lent(held: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, each there until the next one is asked for."""
    largest = max(held.values(), key=Tensor.numel)
    buffer = torch.empty_like(largest).flatten()
    for name, tensor in held.items():
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        buffer.fill_(7.0)


def main(url: str, key: str, device: str, *pushes: str) -> None:
    with Client(url, key) as client, Mortal() if "dies" in pushes else Group() as group:
        for what, folder in zip(pushes[::2], pushes[1::2], strict=True):
            held = dict(stored(Path(folder), device))
            done = client.push(
                lent(held) if what == "lent" else held,
                version=Path(folder).name,
                transport="nccl",
                group=group,
                fp8=what == "fp8",
                chunk_bytes=None if what == "whole" else BUCKET,
            )
            client.verify()
            result = {"digests": client.digests().digests, "chunks": len(done.chunks), "bytes": done.bytes}
            print(json.dumps(result | {"seconds": done.seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
