# SPDX-License-Identifier: Apache-2.0
"""The body by which a client announces tensors that it holds on a GPU."""

from typing import Annotated

from pydantic import Field

from vllm_fp8ext.update.contract.fields import Body, ChunkNumber, Size
from vllm_fp8ext.update.transports.dense_tensor import DenseTensor


class Allocation(Body):
    """A piece of GPU memory of another process."""

    handle: str = Field(
        pattern=r"^[A-Za-z0-9+/]{86}==$", description="Its CUDA IPC handle, 64 bytes in base64."
    )
    bytes: Size = Field(gt=0)


class IpcTensor(DenseTensor):
    """A dense tensor in one of the allocations."""

    allocation: Size = Field(description="Which of `allocations`, from 0 on.")


class Handles(Body):
    """`POST /updates/{id}/handles`: tensors on a GPU of the server's machine. They must stay as they are until it answers."""

    n: ChunkNumber = Field(description="Number of the chunk that they make.")
    device: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="UUID of the GPU.")
    allocations: Annotated[list[Allocation], Field(min_length=1, max_length=65_536)]
    tensors: Annotated[list[IpcTensor], Field(min_length=1, max_length=1 << 20)]
