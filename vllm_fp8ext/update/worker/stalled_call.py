# SPDX-License-Identifier: Apache-2.0
"""Ends a worker in which a trainer's call waits for tensors in vain.

The call runs on the worker's main thread, in the trainer's own code: nothing else could free it, and no request is answered.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from typing import NoReturn

logger = logging.getLogger("vllm.fp8ext")

EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""
_LOOK_SECONDS = 1.0


class StalledCall:
    """Watches from a thread of its own, once something is expected."""

    def __init__(self) -> None:
        self._until: tuple[float, float] | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def expect(self, seconds: float) -> None:
        """End this process unless `expect` or `returned` is called within this time."""
        self._until = time.monotonic() + seconds, seconds
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fp8ext-stalled-call", daemon=True)
            self._thread.start()
        self._wake.set()

    def returned(self) -> None:
        """Expect nothing: the call has returned."""
        self._until = None

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while (expected := self._until) is not None:
                until, seconds = expected
                left = until - time.monotonic()
                if left <= 0:
                    self._end(seconds)
                time.sleep(min(left, _LOOK_SECONDS))

    def _end(self, seconds: float) -> NoReturn:
        try:
            logger.critical(
                "fp8ext: a call that brings tensors by load_weights has neither returned nor brought one for %g s "
                "(native_update_seconds): this worker ends",
                seconds,
            )
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        finally:
            os._exit(EXIT_CODE)
