# SPDX-License-Identifier: Apache-2.0
"""How far a push has come."""

import threading
from collections.abc import Callable

from vllm_fp8ext.serve.client.flow import Sent

Progress = Callable[[int, int | None], None]
"""Called with bytes sent and bytes in all; those are None while tensors are taken one by one."""


class Counter:
    """Bytes sent to all servers, of `total`. Those of a chunk under way are kept by server: it may have to start over."""

    def __init__(self, progress: Progress | None, total: int | None) -> None:
        self._progress = progress
        self._total = total
        self._before = 0
        self._under_way: dict[str, int] = {}
        self._lock = threading.Lock()

    def of(self, url: str) -> Sent:
        """Counts what one server is sent of the chunk under way."""

        def sent(count: int) -> None:
            with self._lock:
                self._under_way[url] = count
                self._report()

        return sent

    def end_chunk(self, size: int) -> None:
        """The chunk under way has been sent, or was there already: `size` bytes over all servers."""
        with self._lock:
            self._before += size
            self._under_way.clear()
            self._report()

    def _report(self) -> None:
        if self._progress:
            self._progress(self._before + sum(self._under_way.values()), self._total)
