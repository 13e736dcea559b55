# SPDX-License-Identifier: Apache-2.0
"""Makes updates of what trainers load into the served model from a worker extension.

They call `collective_rpc` of the engine, and their methods call `model.load_weights` in each worker. The engine core tells
workers before such a call whether tensors may come, and takes in what came when it has returned on all of them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor import UniProcExecutor

from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "core"
WHY: str = "Hear of calls that load weights in workers: vLLM tells the engine core nothing of what they do."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.engine.core:EngineCore.collective_rpc(method, timeout, args, kwargs)",)
USES: dict[str, tuple[str, ...]] = {
    "hear of calls on a model in the engine's own process": (
        "vllm.v1.executor.uniproc_executor:UniProcExecutor.driver_worker",
    ),
    "end an engine in a process of its own whose trainer's call waits in vain": (
        "vllm.v1.engine.core:EngineCoreProc",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's engine core knows when weights are loaded"


def install() -> None:
    """Idempotent."""
    wrap(EngineCore, "collective_rpc", _wrap_collective_rpc)


def attach(core: Any, engine_of: Callable[[Any], Any]) -> None:
    """Have a core whose model takes updates hear of calls. `engine_of`: makes its update engine."""
    calls = core.fp8ext_load_calls = LoadCalls(core, engine_of)
    if isinstance(core.model_executor, UniProcExecutor):
        worker = getattr(core.model_executor, "driver_worker", None)
        rank = getattr(worker, "fp8ext_rank", None)
        if rank is not None:
            rank.loads.around = calls.collected
            rank.loads.may_end = isinstance(core, EngineCoreProc)


def _wrap_collective_rpc(original: Any) -> Any:
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        calls = getattr(self, "fp8ext_load_calls", None)
        if calls is None or method == "fp8ext":
            return original(self, method, timeout, args, kwargs)
        with calls.collected():
            return original(self, method, timeout, args, kwargs)

    return collective_rpc


class LoadCalls:
    """Calls on the workers of one core."""

    def __init__(self, core: Any, engine_of: Callable[[Any], Any]) -> None:
        self._core = core
        self._engine_of = engine_of
        self._inside = False

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Take in what is loaded inside the context, once it is left; inside another one, leave it to that."""
        if self._inside:
            yield
            return
        core, engine = self._core, self._engine_of(self._core)
        engine.tick()
        engine.loads.before()
        self._inside = True
        try:
            yield
        except BaseException as error:
            self._take(core, engine, error)
            raise
        else:
            self._take(core, engine, None)
        finally:
            self._inside = False

    def _take(self, core: Any, engine: Any, error: BaseException | None) -> None:
        try:
            with core.fp8ext_watchdog.watching("load_weights"):
                engine.loads.after(error)
        finally:
            core.fp8ext_changes.tell()
