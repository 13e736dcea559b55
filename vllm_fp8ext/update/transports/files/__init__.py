# SPDX-License-Identifier: Apache-2.0
"""Tensors are read from the server's disk."""

from vllm_fp8ext.update.transports.files.message import FileSource
from vllm_fp8ext.update.transports.transport import Transport

TRANSPORT = Transport(
    name="files",
    summary="a checkpoint on the server's disk",
    source=FileSource,
    receiver="vllm_fp8ext.update.transports.files.receiver:FileReceiver",
)
"""`POST /updates/{id}/files` names a folder; the server makes a chunk of each of its files."""
