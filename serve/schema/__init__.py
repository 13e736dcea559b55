# SPDX-License-Identifier: Apache-2.0
"""The bodies of `/fp8ext/v1`, by which client and server agree. Imports neither vLLM nor torch."""

from vllm_fp8ext.serve.schema.answers import (
    ChunkState,
    Committed,
    Digests,
    FeatureStatus,
    LastUpdate,
    Problem,
    QuantizationError,
    Update,
    Verified,
    Weights,
)
from vllm_fp8ext.serve.schema.kv_scales import (
    Fit,
    KvScalesServed,
    KvScalesSummary,
    Rescaled,
    Traffic,
    WorstFit,
    WorstTraffic,
)
from vllm_fp8ext.serve.schema.requests import (
    Canary,
    Current,
    Epoch,
    ExpertLayout,
    HeadScales,
    Instance,
    KvScales,
    LayerScales,
    Load,
    OpenUpdate,
    Rollback,
    Running,
    Scale,
    Sleep,
    TensorClaim,
    Token,
    UpdateId,
    WaitSeconds,
    Wake,
)
from vllm_fp8ext.update.contract.fields import Body
from vllm_fp8ext.update.transports.dense_tensor import DenseTensor
from vllm_fp8ext.update.transports.files.body import Files
from vllm_fp8ext.update.transports.ipc.body import Allocation, Handles, IpcTensor
from vllm_fp8ext.update.transports.nccl.body import BroadcastGroup, Receive

PREFIX = "/fp8ext/v1"
PROBLEM = "urn:fp8ext:problem:"
"""Prefix of every problem type (RFC 9457)."""

__all__ = [
    "PREFIX",
    "PROBLEM",
    "Allocation",
    "Body",
    "BroadcastGroup",
    "Canary",
    "ChunkState",
    "Committed",
    "Current",
    "DenseTensor",
    "Digests",
    "Epoch",
    "ExpertLayout",
    "FeatureStatus",
    "Files",
    "Fit",
    "Handles",
    "HeadScales",
    "Instance",
    "IpcTensor",
    "KvScales",
    "KvScalesServed",
    "KvScalesSummary",
    "LastUpdate",
    "LayerScales",
    "Load",
    "OpenUpdate",
    "Problem",
    "QuantizationError",
    "Receive",
    "Rescaled",
    "Rollback",
    "Running",
    "Scale",
    "Sleep",
    "TensorClaim",
    "Token",
    "Traffic",
    "Update",
    "UpdateId",
    "Verified",
    "WaitSeconds",
    "Wake",
    "Weights",
    "WorstFit",
    "WorstTraffic",
]
