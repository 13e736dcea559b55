# SPDX-License-Identifier: Apache-2.0
"""Reaches into the engine core: one utility method for all calls of an update, and the step boundary of a commit.

Replaces nothing; adds `EngineCore.fp8ext`, which vLLM dispatches by name like its own utility methods. Can go once vLLM lets
a plugin register an engine utility method.
"""

import time
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from vllm_fp8ext.compat.prefix_cache import EpochPrefixCache
from vllm_fp8ext.config import Settings
from vllm_fp8ext.weights.labels import Label


def install() -> None:
    """Add our method to the engine core. Idempotent."""
    EngineCore.fp8ext = call


def call(self: Any, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One operation of the update engine (`weights.engine`); made on first use. Never raises."""
    from vllm_fp8ext.weights.engine import UpdateEngine

    engine = getattr(self, "fp8ext_engine", None)
    if engine is None:
        engine = self.fp8ext_engine = UpdateEngine(CoreAccess(self))
    result = engine.handle(operation, arguments)
    assert isinstance(result, dict)
    return result


class CoreAccess:
    """The few things that an update needs of an engine core."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.settings = Settings.parse(core.vllm_config.additional_config)
        self.quantization = core.vllm_config.model_config.quantization
        self.kv_cache_dtype = core.vllm_config.cache_config.cache_dtype
        self._prefix_cache = EpochPrefixCache(core, 0) if self.quantization == "blockfp8" else None

    def ranks(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Run a `Rank` method on every worker; one result each."""
        results: list[dict[str, Any]] = self._core.collective_rpc("fp8ext", args=(method, *args))
        return results

    def pause(self) -> float:
        """Stop scheduling and finish the steps in flight; their outputs leave under the old version. Seconds taken."""
        start = time.perf_counter()
        core = self._core
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:
            outputs, executed = core.step_with_batch_queue()
            for output in (outputs or {}).items():
                core.output_queue.put_nowait(output)
            core.post_step(executed)
        return time.perf_counter() - start

    def resume(self) -> None:
        """Schedule again."""
        self._core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def paused(self) -> bool:
        """Whether somebody else has paused the engine (sleep, say)."""
        return bool(self._core.scheduler.pause_state != PauseState.UNPAUSED)

    def label(self, label: Label) -> None:
        """Mark every token sampled from now on."""
        self._core.set_weight_version(label.encode())

    def enter_epoch(self, epoch: int, *, recompute: bool) -> None:
        """Make cached K and V of earlier epochs unreachable."""
        if self._prefix_cache is not None:
            self._prefix_cache.advance(epoch, recompute=recompute)
