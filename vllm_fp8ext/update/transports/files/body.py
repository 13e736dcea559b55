# SPDX-License-Identifier: Apache-2.0
"""The body by which a client names a checkpoint on the server's disk."""

from pydantic import Field

from vllm_fp8ext.update.contract.fields import Body, Path


class Files(Body):
    """`POST /updates/{id}/files`."""

    path: Path = Field(
        description="A safetensors file, or a folder of them, under a folder that the operator allowed."
    )
