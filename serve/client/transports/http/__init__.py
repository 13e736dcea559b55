# SPDX-License-Identifier: Apache-2.0
"""Sends tensors as the bodies of requests."""

from vllm_fp8ext.serve.client.transports.http.sender import HttpSender
from vllm_fp8ext.serve.client.transports.sender import ClientTransport

TRANSPORT = ClientTransport(name="http", prepare=HttpSender.prepare, has_checksums=True)
