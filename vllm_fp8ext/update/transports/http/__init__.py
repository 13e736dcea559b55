# SPDX-License-Identifier: Apache-2.0
"""Tensors come as bodies of requests, through a buffer in shared memory."""

from vllm_fp8ext.update.transports.http.message import UploadSource
from vllm_fp8ext.update.transports.transport import Transport

TRANSPORT = Transport(
    name="http",
    summary="bodies of requests, through shared memory of the server",
    source=UploadSource,
    receiver="vllm_fp8ext.update.transports.http.receiver:UploadReceiver",
)
"""Bodies come by `PUT /updates/{id}/chunks/{n}`."""
