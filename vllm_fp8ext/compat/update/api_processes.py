# SPDX-License-Identifier: Apache-2.0
"""Ends a server of several API processes as a whole (`--api-server-count`).

vLLM's launcher ends all processes when one has failed, with its own exit code. It leaves API processes alone when it is
killed, and what a process that was killed has left in shared memory. Its API processes let no request finish.
"""

import asyncio
import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Self

from vllm_fp8ext.compat.update.engine_shutdown import EngineEnd
from vllm_fp8ext.compat.update.owner_process import follow_as
from vllm_fp8ext.compat.update.watchdog import EXIT_CODE
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.shared_memory import remove_left, remove_left_spools

FEATURE: str = "core"
WHY: str = "End all processes of a server together: vLLM's API processes outlive their launcher."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.entrypoints.cli.serve:wait_for_completion_or_failure",)
USES: dict[str, tuple[str, ...]] = {
    "know how many API processes a server has": (
        "vllm.config.parallel:ParallelConfig._api_process_count",
        "vllm.config.parallel:ParallelConfig._api_process_rank",
    ),
    "let running requests finish": (
        "vllm.v1.engine.output_processor:OutputProcessor.request_states",
        "vllm.v1.engine.core_client:AsyncMPClient.abort_requests_async(request_ids)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = (
    "vLLM's API processes let requests finish, and end with their launcher, which has an exit code"
)

logger = logging.getLogger("vllm.fp8ext")

_LAUNCHER = "vllm.entrypoints.cli.serve"
_PROCESS = "ApiServer"
"""Begin of the names of API processes; a number follows."""
_END_SECONDS = 2.0
"""Seconds that an API process takes to end after its requests: part of the time that vLLM gives it."""
_LOOK_SECONDS = 0.02

_at_end: list[Callable[[], object]] = []


@dataclass(frozen=True, kw_only=True)
class ApiProcesses:
    """The API server processes of one engine, and which of them this is: -1 in their launcher."""

    count: int = 1
    rank: int = 0

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return what a `VllmConfig` says."""
        parallel = getattr(config, "parallel_config", None)
        count = getattr(parallel, "_api_process_count", 1)
        return cls(count=count, rank=getattr(parallel, "_api_process_rank", 0) if count > 1 else 0)


def install(config: Any, spool_dir: str) -> None:
    """Have this process end with the others, if it is one of several. Idempotent."""
    processes = ApiProcesses.of(config)
    if processes.count == 1:
        return
    if processes.rank >= 0:
        follow_as(_PROCESS, _end)
    elif _LAUNCHER in sys.modules:
        wrap(sys.modules[_LAUNCHER], "wait_for_completion_or_failure", _wrap_wait_for_completion_or_failure)
        atexit.unregister(_remove_what_is_left)
        atexit.register(_remove_what_is_left, spool_dir)


def call_at_end(call: Callable[[], object]) -> None:
    """Call this in an API process that ends because its launcher was killed."""
    _at_end.append(call)


def let_requests_finish(
    engine_client: Any, loop: asyncio.AbstractEventLoop, end: EngineEnd, seconds: float
) -> None:
    """Wait until the requests of this API process have ended, then abort the others.

    It is called on a thread, and waits for up to `seconds`.

    An engine of several API processes is stopped when these have ended: it would go on with what nobody reads.
    """
    requests, core = engine_client.output_processor.request_states, engine_client.engine_core
    until = time.monotonic() + max(seconds - _END_SECONDS, seconds / 2)
    while requests and not (core.resources.engine_dead or end.engine_ended()):
        if time.monotonic() > until:
            aborting = asyncio.run_coroutine_threadsafe(core.abort_requests_async(list(requests)), loop)
            with contextlib.suppress(FutureTimeoutError):
                aborting.result(_END_SECONDS / 4)
            return
        time.sleep(_LOOK_SECONDS)


def _wrap_wait_for_completion_or_failure(original: Any) -> Any:
    def wait(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except RuntimeError as error:
            logger.critical("fp8ext: %s; so this server ends with %d", error, EXIT_CODE)
            raise SystemExit(EXIT_CODE) from error

    return wait


def _remove_what_is_left(spool_dir: str) -> None:
    """Remove what API processes, engine and workers have left that were killed; all of them have ended."""
    remove_left()
    remove_left_spools(spool_dir)


def _end() -> None:
    for call in _at_end:
        with contextlib.suppress(Exception):
            call()
    os._exit(EXIT_CODE)
