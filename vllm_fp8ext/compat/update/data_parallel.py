# SPDX-License-Identifier: Apache-2.0
"""Knows the engine cores that one server starts for its data-parallel ranks (`--data-parallel-size`).

A core of a dense model is told by vLLM that it is alone. So the number of them is written down before they are started. They
find each other by a name that only processes with the same launcher can compute: of its key, and of the sockets by which its
API server processes call them.
"""

import hashlib
import multiprocessing
from dataclasses import dataclass
from typing import Any, Self

FEATURE: str = "core"
WHY: str = "Know the other engine cores of a server: vLLM's cores of a dense model do not."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "know the engine cores of a server": (
        "vllm.config.parallel:ParallelConfig.data_parallel_index",
        "vllm.config.parallel:ParallelConfig.data_parallel_size_local",
        "vllm.config.parallel:ParallelConfig.data_parallel_backend",
        "vllm.config.parallel:ParallelConfig.data_parallel_external_lb",
        "vllm.config.parallel:ParallelConfig.data_parallel_hybrid_lb",
        "vllm.v1.engine.core:EngineCoreProc.addresses",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM tells each core of a dense model how many there are"

KEY = "fp8ext_engine_cores"
"""Key of vLLM's additional configuration: the number of engine cores, where there are several."""


@dataclass(frozen=True, kw_only=True)
class EngineCores:
    """The engine cores of one server, and which of them a process belongs to. Core 0 has their update engine."""

    count: int = 1
    index: int = 0

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return what a `VllmConfig` in a core, or in one of its workers, says."""
        count = (getattr(config, "additional_config", None) or {}).get(KEY, 1)
        return cls(count=count, index=config.parallel_config.data_parallel_index) if count > 1 else cls()


def name_of(core: Any) -> str:
    """Return the name of all cores of a server in this life, in hexadecimal."""
    sockets = "\n".join(core.addresses.inputs).encode()
    return hashlib.sha256(multiprocessing.current_process().authkey + sockets).hexdigest()


def tell(config: Any) -> None:
    """Note in a `VllmConfig` how many engine cores there will be."""
    count = config.parallel_config.data_parallel_size
    if count > 1 and beyond_one_server(config) is None:
        config.additional_config = {**(config.additional_config or {}), KEY: count}


def beyond_one_server(config: Any) -> str | None:
    """Say by which option not all engine cores are this server's own; None if they are."""
    parallel = config.parallel_config
    if parallel.data_parallel_external_lb:
        return "--data-parallel-external-lb, or --data-parallel-rank"
    if parallel.data_parallel_hybrid_lb:
        return "--data-parallel-hybrid-lb, or --data-parallel-start-rank"
    if parallel.data_parallel_backend != "mp":
        return f"--data-parallel-backend {parallel.data_parallel_backend}"
    if parallel.data_parallel_size_local != parallel.data_parallel_size:
        return "--data-parallel-size-local"
    return None
