# SPDX-License-Identifier: Apache-2.0
"""The body by which a client announces a bucket that it is about to broadcast."""

from typing import Annotated, Literal

from pydantic import Field

from vllm_fp8ext.update.contract.fields import Body, ChunkNumber, Size
from vllm_fp8ext.update.transports.dense_tensor import DenseTensor


class BroadcastGroup(Body):
    """Who takes part in a broadcast. The sender is rank 0; several servers may share one group."""

    backend: Literal["nccl", "gloo"]
    id: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="`nccl`: a unique id, 128 bytes in base64. `gloo`: `host:port/name`, of a TCP store of torch that the "
        "sender runs, and a prefix of its keys. A new group needs a new one."
    )
    size: int = Field(ge=2, le=65_536)
    first_rank: int = Field(ge=1, description="Rank of the server's first rank; the others follow.")


class Receive(Body):
    """`POST /updates/{id}/receive`: a bucket of bytes with tensors in it, which is ready to be broadcast. Chunks are received
    in the order in which they are told."""

    n: ChunkNumber = Field(description="Number of the chunk that they make.")
    group: BroadcastGroup
    bytes: Size = Field(gt=8, description="Of the bucket: 8 more than those before the mark.")
    mark: str = Field(
        pattern=r"^[0-9a-f]{16}$", description="The bucket's last 8 bytes, in hexadecimal: random ones."
    )
    tensors: Annotated[list[DenseTensor], Field(min_length=1, max_length=1 << 20)]
