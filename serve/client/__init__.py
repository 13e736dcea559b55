# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of `/fp8ext/v1`: the one place that knows the HTTP API. Needs neither torch nor numpy nor vLLM."""

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client.changes import changed_slices
from vllm_fp8ext.serve.client.clients import AsyncClient, AsyncReplicas, Client, Replicas
from vllm_fp8ext.serve.client.flat import flatten
from vllm_fp8ext.serve.client.options import (
    CHUNKS_IN_FLIGHT,
    ClientPushOptions,
    PushOptions,
    ReplicasPushOptions,
    Transport,
)
from vllm_fp8ext.serve.client.progress import Progress
from vllm_fp8ext.serve.client.servers import ServersDns, ServersFile
from vllm_fp8ext.serve.client.sharded import local_slices
from vllm_fp8ext.serve.client.source import Pushable
from vllm_fp8ext.serve.client.transports.http.chunks import CHUNK_BYTES
from vllm_fp8ext.serve.client.transports.nccl.group import Group
from vllm_fp8ext.update.contract.tensor_slices import slice_name

__all__ = [
    "CHUNKS_IN_FLIGHT",
    "CHUNK_BYTES",
    "AsyncClient",
    "AsyncReplicas",
    "Client",
    "ClientPushOptions",
    "Group",
    "Progress",
    "PushOptions",
    "Pushable",
    "Replicas",
    "ReplicasPushOptions",
    "ServersDns",
    "ServersFile",
    "Transport",
    "UpdateError",
    "changed_slices",
    "flatten",
    "local_slices",
    "slice_name",
]
