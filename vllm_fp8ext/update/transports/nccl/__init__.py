# SPDX-License-Identifier: Apache-2.0
"""Tensors are broadcast to all ranks: through NCCL between GPUs, through Gloo between CPUs."""

from vllm_fp8ext.update.transports.nccl.body import Receive
from vllm_fp8ext.update.transports.nccl.message import BroadcastSource, announce
from vllm_fp8ext.update.transports.transport import Route, Transport

TRANSPORT = Transport(
    name="nccl",
    summary="tensors on other GPUs, or on the CPU, broadcast to all ranks",
    source=BroadcastSource,
    receiver="vllm_fp8ext.update.transports.nccl.receiver:BroadcastReceiver",
    route=Route(
        path="receive",
        summary="Receive tensors that the client is about to broadcast",
        body=Receive,
        announce=announce,
        waits=False,
    ),
)
