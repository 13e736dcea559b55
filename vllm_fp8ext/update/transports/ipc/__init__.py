# SPDX-License-Identifier: Apache-2.0
"""Tensors are read where they are, on a GPU of the server's machine."""

from vllm_fp8ext.update.transports.ipc.body import Handles
from vllm_fp8ext.update.transports.ipc.message import IpcSource, announce
from vllm_fp8ext.update.transports.transport import Route, Transport

TRANSPORT = Transport(
    name="ipc",
    summary="tensors on a GPU of the server's machine, read where they are",
    source=IpcSource,
    receiver="vllm_fp8ext.update.transports.ipc.receiver:IpcReceiver",
    route=Route(
        path="handles",
        summary="Read tensors where they are on a GPU of this machine",
        body=Handles,
        announce=announce,
    ),
)
