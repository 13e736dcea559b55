# SPDX-License-Identifier: Apache-2.0
"""Worker of an engine that has a KV cache only in its turn."""

import fcntl
import os
from typing import Any

from vllm.v1.worker import gpu_worker

from vllm_fp8ext.bench.engines import LENDS


class Worker(gpu_worker.Worker):
    """Waits for that memory wherever vLLM takes it: engines that start side by side too, each up to its K and V."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._memory = os.open(os.environ[LENDS], os.O_WRONLY | os.O_CREAT)
        fcntl.flock(self._memory, fcntl.LOCK_EX)
        super().initialize_from_config(kv_cache_config)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            fcntl.flock(self._memory, fcntl.LOCK_EX)
        super().wake_up(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        super().discard(tags)
        if "kv_cache" in tags:
            fcntl.flock(self._memory, fcntl.LOCK_UN)
