# SPDX-License-Identifier: Apache-2.0
"""Sends handles of tensors on a GPU, which its server reads where they are."""

from vllm_fp8ext.serve.client.transports.ipc.sender import IpcSender
from vllm_fp8ext.serve.client.transports.sender import ClientTransport

TRANSPORT = ClientTransport(name="ipc", prepare=IpcSender.prepare, several_servers=False)
