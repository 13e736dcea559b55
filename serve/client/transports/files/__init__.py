# SPDX-License-Identifier: Apache-2.0
"""Names a checkpoint on the server's own disk."""

from vllm_fp8ext.serve.client.transports.files.sender import FilesSender
from vllm_fp8ext.serve.client.transports.sender import ClientTransport

TRANSPORT = ClientTransport(name="files", prepare=FilesSender.prepare, sends_tensors=False)
