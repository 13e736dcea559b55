# SPDX-License-Identifier: Apache-2.0
"""Measures how long work takes that may only be queued."""

import time
from types import TracebackType

import torch


class Stopwatch:
    """Times what is done in its context: on a GPU, what was queued on the current stream meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = self._start = 0.0
        if self._on_gpu:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        if self._on_gpu:
            self._begin.record()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._seconds = time.perf_counter() - self._start
        if self._on_gpu:
            self._end.record()

    def wait(self) -> float:
        """Wait until it is done; return the seconds since its turn came."""
        if not self._on_gpu:
            return self._seconds
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3
