# SPDX-License-Identifier: Apache-2.0
"""The registry of transports: one entry for each folder. Needs neither torch nor vLLM."""

from collections.abc import Mapping
from typing import Any

from vllm_fp8ext.update.transports import files, http, ipc, native, native_ipc, nccl
from vllm_fp8ext.update.transports.transport import Source, Transport

TRANSPORTS: Mapping[str, Transport] = {
    transport.name: transport
    for transport in (
        *(http.TRANSPORT, files.TRANSPORT, ipc.TRANSPORT, nccl.TRANSPORT),
        *(native.TRANSPORT, native_ipc.TRANSPORT),
    )
}
"""Every transport by its name."""


def source_from_dict(fields: Mapping[str, Any]) -> Source:
    """Return the source that `Source.as_dict` described."""
    values = dict(fields)
    return TRANSPORTS[values.pop("transport")].source.from_dict(values)
