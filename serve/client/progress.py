# SPDX-License-Identifier: Apache-2.0
"""How far a push has come."""

import threading
from collections.abc import Callable

from vllm_fp8ext.serve.client.flow import Sent

Progress = Callable[[int, int | None], None]
"""Called with bytes sent and bytes in all; those are None while tensors are taken one by one."""


class Counter:
    """Bytes sent to all servers, of `total`. Those of a chunk under way are kept by chunk and server: it may have to start
    over. Chunks may be counted in several threads."""

    def __init__(self, progress: Progress | None, total: int | None) -> None:
        self._progress = progress
        self._total = total
        self._before = 0
        self._under_way: dict[int, dict[str, int]] = {}
        self._lock = threading.Lock()

    def of(self, n: int, url: str) -> Sent:
        """Counts what one server is sent of chunk `n`."""

        def sent(count: int) -> None:
            with self._lock:
                self._under_way.setdefault(n, {})[url] = count
                self._report()

        return sent

    def end_chunk(self, n: int, size: int) -> None:
        """Chunk `n` has been sent, or was there already: `size` bytes over all servers."""
        with self._lock:
            self._before += size
            self._under_way.pop(n, None)
            self._report()

    def _report(self) -> None:
        if self._progress:
            sent = sum(sum(counts.values()) for counts in self._under_way.values())
            self._progress(self._before + sent, self._total)
