# SPDX-License-Identifier: Apache-2.0
"""Ways to push weights that are measured: each transport of the client, and what can be changed about it."""

from vllm_fp8ext.serve.client.transports.registry import SENDERS

NATIVE = ("native", "native-packed", "native-typed")
"""Ways of vLLM's own trainer engine (`bench.native`)."""


def push_variants() -> tuple[str, ...]:
    """Return names of all: `http-fp8` quantizes before it sends, `http-plain` sends no checksums; and `NATIVE`."""
    names: list[str] = []
    for name, transport in SENDERS.items():
        names.append(name)
        if transport.sends_tensors:
            names.append(f"{name}-fp8")
        if transport.has_checksums:
            names.append(f"{name}-plain")
    return (*names, *NATIVE)


def tensor_transports() -> tuple[str, ...]:
    """Return the names of transports that take tensors."""
    return tuple(name for name, transport in SENDERS.items() if transport.sends_tensors)


def transport_of(variant: str) -> str:
    """Return the client's name for a variant: `http` for `http-fp8`."""
    return variant.partition("-")[0]
