# SPDX-License-Identifier: Apache-2.0
"""vLLM's own weight transfer by CUDA IPC: tensors that a trainer's torch has exported on a GPU of the server's machine."""

from vllm_fp8ext.update.transports.native_ipc.message import NativeIpcSource
from vllm_fp8ext.update.transports.transport import Transport

TRANSPORT = Transport(
    name="native_ipc",
    summary="tensors on a GPU of the server's machine, as vLLM's weight transfer hands them over",
    source=NativeIpcSource,
    receiver="vllm_fp8ext.update.transports.native_ipc.receiver:NativeIpcReceiver",
)
