# SPDX-License-Identifier: Apache-2.0
"""The registry of the client's transports: one entry for each folder."""

from collections.abc import Mapping

from vllm_fp8ext.serve.client.transports import files, http, ipc, nccl
from vllm_fp8ext.serve.client.transports.sender import ClientTransport

SENDERS: Mapping[str, ClientTransport] = {
    transport.name: transport
    for transport in (http.TRANSPORT, ipc.TRANSPORT, nccl.TRANSPORT, files.TRANSPORT)
}
"""Every transport of `push` by its name; `options.Transport` lists the names for type checkers."""
