# SPDX-License-Identifier: Apache-2.0
"""Sends handles of tensors on a GPU of the server's machine, which reads them where they are."""

from vllm_fp8ext.serve.client.transports.ipc.sender import IpcSender
from vllm_fp8ext.serve.client.transports.sender import ClientTransport

TRANSPORT = ClientTransport(name="ipc", prepare=IpcSender.prepare, several_servers=False)
