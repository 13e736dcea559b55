# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a GPU while something runs."""

import threading


class PeakMemory:
    """Peak GPU memory in bytes, beyond what was taken before."""

    peak: int | None = None

    def __enter__(self) -> "PeakMemory":
        import torch

        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if torch.cuda.is_available():
            before = torch.cuda.mem_get_info()[0]

            def watch() -> None:
                while not self._stop.wait(0.002):
                    self.peak = max(self.peak or 0, before - torch.cuda.mem_get_info()[0])

            self._thread = threading.Thread(target=watch)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()
