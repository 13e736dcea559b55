# SPDX-License-Identifier: Apache-2.0
"""Tells how an engine's processes end: by a failure, or by somebody's wish.

Replaced on instances: `validate_alive`, to note that an engine told of its death, and `shutdown`, to note which processes had
ended before they were stopped.
"""

import contextlib
import logging
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_fp8ext.compat.update.owner_process import end_children
from vllm_fp8ext.compat.update.watchdog import EXIT_CODE
from vllm_fp8ext.errors import ConfigError

FEATURE: str = "core"
WHY: str = "End with a code of its own when the engine died: vLLM's server ends with 0."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.engine.core_client:BackgroundResources.validate_alive(frames)",
    "vllm.v1.engine.utils:CoreEngineProcManager.shutdown",
)
USES: dict[str, tuple[str, ...]] = {
    "end with the engine's exit code": ("vllm.v1.engine.core_client:BackgroundResources.engine_manager",),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/48966"
REMOVE_WHEN: str = "vLLM's server has an exit code when its engine died"

logger = logging.getLogger("vllm.fp8ext")

_END_SECONDS = 10.0
"""How long a process that has begun to end may take for the rest: memory of a GPU is given back then."""
_LOOK_SECONDS = 0.01
_STUCK = "none"
"""In place of the code of a process that took longer."""
_WISHED = (None, 0, -signal.SIGTERM, -signal.SIGINT)

Code = int | str | None


class EngineEnd:
    """Notes how the processes of an engine end, from now until `close`. Holds nothing of the engine's client, which stops its
    engine when nobody holds it any more.

    One of several API server processes has started no engine: the launcher has, and ends with it.

    Raises:
        ConfigError: somebody else does it already.
    """

    def __init__(self, resources: Any) -> None:
        manager = resources.engine_manager
        self._processes: list[Any] = list(manager.processes) if manager else []
        self._adopted: list[psutil.Process] = []
        self._died = False
        self._codes: list[Code] | None = None
        """When the processes were stopped."""
        if "validate_alive" in vars(resources):
            raise ConfigError(
                "expected one session of updates for an engine at a time, found another one: leave its `with` before"
            )
        self._undo = contextlib.ExitStack()
        self._undo.callback(
            replace(resources, "validate_alive", self._wrap_validate_alive(resources.validate_alive))
        )
        if manager:
            self._undo.callback(replace(manager, "shutdown", self._wrap_shutdown(manager.shutdown)))

    def adopt(self, pids: Sequence[int]) -> None:
        """Know the processes of an engine's cores that another process of this machine has started."""
        if not self._processes:
            for pid in pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._adopted.append(psutil.Process(pid))

    def close(self) -> None:
        """Note no more, and leave the instances as they were."""
        self._undo.close()

    def engine_ended(self) -> bool:
        """Tell whether an engine core that was adopted has ended."""
        try:
            return any(
                not core.is_running() or core.status() == psutil.STATUS_ZOMBIE for core in self._adopted
            )
        except psutil.NoSuchProcess:
            return True

    def kill(self, reason: str) -> None:
        """End the engine and its workers at once, also where they are stopped."""
        logger.critical("fp8ext: %s: the engine is ended", reason)
        for process in self._processes:
            if process.is_alive():
                end_children(process.pid)
                process.kill()
        for core in self._adopted:
            with contextlib.suppress(psutil.NoSuchProcess):
                end_children(core.pid)
                core.kill()

    def require_clean(self) -> None:
        """End this process with `EXIT_CODE` when the engine's process failed.

        It is called when this process ends.

        vLLM's server ends with 0 when its engine died, which a supervisor takes for a wish. An engine that it stops itself,
        by force if that takes long, did not fail.
        """
        codes = self._exit_codes() if self._codes is None else self._codes
        failed = [code for code in codes if code not in _WISHED]
        if failed or self._died:
            logger.critical(
                "fp8ext: the engine died (code %s); so this server ends with %d", failed or codes, EXIT_CODE
            )
            logging.shutdown()
            os._exit(EXIT_CODE)

    def _wrap_validate_alive(self, check: Callable[[Any], None]) -> Callable[[Any], None]:
        """An engine that fails says so before it ends; vLLM's server may stop it then, and its code is that of a wish."""

        def validate_alive(frames: Any) -> None:
            try:
                check(frames)
            except EngineDeadError:
                self._died = True
                raise

        return validate_alive

    def _wrap_shutdown(self, shutdown: Callable[..., None]) -> Callable[..., None]:
        def noted(*arguments: Any, **named: Any) -> None:
            if self._codes is None:
                self._codes = self._exit_codes()
            shutdown(*arguments, **named)

        return noted

    def _exit_codes(self) -> list[Code]:
        # a process that ends closes its sentinel, by which vLLM's monitor sees the end, before it has a code
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes], timeout=0)
        until = time.monotonic() + _END_SECONDS
        return [
            _code(process, until) if process.sentinel in ended else process.exitcode
            for process in self._processes
        ]


def _code(process: Any, until: float) -> Code:
    while process.exitcode is None and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    return _STUCK if process.exitcode is None else process.exitcode


def replace(owner: Any, name: str, by: Any) -> Callable[[], None]:
    """Give an instance an attribute of its own; returns what undoes that."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    setattr(owner, name, by)

    def undo() -> None:
        delattr(owner, name)
        vars(owner).update(before)

    return undo
