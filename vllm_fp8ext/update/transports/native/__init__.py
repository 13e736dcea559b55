# SPDX-License-Identifier: Apache-2.0
"""vLLM's own weight transfer: tensors that a trainer broadcasts through vLLM's stateless process group."""

from vllm_fp8ext.update.transports.native.message import NativeSource
from vllm_fp8ext.update.transports.transport import Transport

TRANSPORT = Transport(
    name="native",
    summary="tensors that a trainer broadcasts by vLLM's weight transfer",
    source=NativeSource,
    receiver="vllm_fp8ext.update.transports.native.receiver:NativeReceiver",
)
