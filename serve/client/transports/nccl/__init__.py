# SPDX-License-Identifier: Apache-2.0
"""Broadcasts tensors to every rank of the servers."""

from vllm_fp8ext.serve.client.transports.nccl.sender import BroadcastSender
from vllm_fp8ext.serve.client.transports.sender import ClientTransport

TRANSPORT = ClientTransport(name="nccl", prepare=BroadcastSender.prepare)
