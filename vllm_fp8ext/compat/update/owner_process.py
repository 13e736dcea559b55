# SPDX-License-Identifier: Apache-2.0
"""Ends an engine and its workers when the process that owns the engine has ended: a server's launcher, or a trainer.

Every engine core makes an executor before it makes a worker.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable
from typing import Any

import psutil

from vllm_fp8ext.compat.update.watchdog import EXIT_CODE
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.config import METHOD
from vllm_fp8ext.shared_memory import remove_left

FEATURE: str = "core"
WHY: str = "End an engine with the process that owns it: vLLM's engine core outlives it."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.executor.abstract:Executor.__init__(vllm_config)",)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = (
    "vLLM's engine core ends with the process that started it, as its workers end with the engine core"
)

logger = logging.getLogger("vllm.fp8ext")

_ENGINE, _WORKER = "EngineCore", "VllmWorker"
"""How vLLM names its processes; a rank or a number follows."""
_WORKER_GRACE_SECONDS = 5.0
"""For a worker's own way out, which vLLM's pipe to the engine core begins."""
_LOG_SECONDS = 1.0
"""Longest time that telling of the end may take: nobody may read the log any more."""

_following: set[int] = set()
"""Processes that follow their owner: a forked process has the set of its parent."""


def install() -> None:
    """Follow the owner from when an engine core makes its executor. Idempotent."""
    from vllm.v1.executor.abstract import Executor  # of no use to processes that only follow

    wrap(Executor, "__init__", _wrap_init)


def _wrap_init(make: Any) -> Any:
    def made(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if vllm_config.model_config.quantization == METHOD:
            remove_left()
            follow_as(_ENGINE, _end_engine)
        make(self, vllm_config, *args, **kwargs)

    return made


def follow_engine() -> None:
    """End this worker some seconds after its engine core, if that is another process. Idempotent."""
    follow_as(_WORKER, _end_worker)


def follow_as(name: str, end: Callable[[], None]) -> None:
    """Call `end` once this process's parent has ended, if vLLM named this one so.

    multiprocessing gives each process a pipe that its parent holds. A process that the parent has forked holds it as well:
    so where the kernel tells of the parent itself, that is listened to, too.
    """
    parent: Any = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(name):
        return
    if os.getpid() in _following:
        return
    _following.add(os.getpid())
    signs = [parent.sentinel]
    if parent.pid is not None and hasattr(os, "pidfd_open"):
        try:
            signs.append(os.pidfd_open(parent.pid))
        except OSError:  # it has ended, or the kernel is older
            logger.debug("fp8ext: process %d is known by its pipe alone", parent.pid)

    def wait() -> None:
        multiprocessing.connection.wait(signs)
        end()

    threading.Thread(target=wait, name="fp8ext-owner", daemon=True).start()


def _end_engine() -> None:
    threading.Timer(_LOG_SECONDS, _kill).start()
    logger.critical("fp8ext: the process that owns this engine has ended: the engine ends")
    _kill()


def _kill() -> None:
    end_children(os.getpid())
    os._exit(EXIT_CODE)


def end_children(pid: int) -> None:
    """Kill every process that a process has started, and those that they have."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _end_worker() -> None:
    threading.Event().wait(_WORKER_GRACE_SECONDS)
    os._exit(EXIT_CODE)
