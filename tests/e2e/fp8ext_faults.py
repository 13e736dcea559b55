# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin for tests: breaks one point of an update when a file says so. Lives in every process of the server.

`FP8EXT_FAULT` names a JSON file, `{"point", "kind", "rank", "lasting"}`, and `seconds` where the kind is "slow". It is taken
away when the fault happens, unless it lasts.
"""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any


def register() -> None:
    """The entry point: wrap each point. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_fp8ext.update.engine.engine import UpdateEngine
    from vllm_fp8ext.update.engine.updates import Updates
    from vllm_fp8ext.update.worker.rank import Rank
    from vllm_fp8ext.update.worker.stager import Stager
    from vllm_fp8ext.update.worker.weight_swap import WeightSwap

    if hasattr(Rank, "fp8ext_faults"):
        return
    Rank.fp8ext_faults = True  # type: ignore[attr-defined]  # a mark of ours
    original = Rank.__init__

    def noted(self: Any, shadow: Any, rank: int, *args: Any, **more: Any) -> None:
        shadow.stager.fault_rank = shadow.weight_swap.fault_rank = rank
        original(self, shadow, rank, *args, **more)

    Rank.__init__ = noted  # type: ignore[method-assign]  # faults are put in here
    _wrap(Updates, "open", "open", lambda self: 0)
    _wrap(Scheduler, "schedule", "step", lambda self: 0)
    _wrap(UpdateEngine, "commit", "call to commit", lambda self: 0)
    _wrap(Rank, "stage", "chunk", lambda self: self.rank)
    _wrap(Stager, "stage", "staging", lambda self: self.fault_rank)
    _wrap(Rank, "run_canary", "prepare", lambda self: self.rank)
    _wrap(WeightSwap, "_swap", "exchange", lambda self: self.fault_rank, skip=2)
    _wrap(WeightSwap, "fingerprint", "verify", lambda self: self.fault_rank)
    with contextlib.suppress(ImportError):
        from loading_worker import LoadingWorker

        _wrap(LoadingWorker, "between", "between", lambda self: self.rank)


def _wrap(owner: Any, name: str, point: str, rank_of: Any, skip: int = 0) -> None:
    """`skip`: calls that go well while the file is there, so that the fault strikes half-way."""
    original = getattr(owner, name)
    calls = 0

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if Path(os.environ["FP8EXT_FAULT"]).exists():
            calls += 1
            if calls > skip:
                _happen(point, rank_of(self), self, calls - skip)
        else:
            calls = 0
        return original(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _happen(point: str, rank: int, where: Any, call: int) -> None:
    """`call`: the number of this one, from 1."""
    file = Path(os.environ["FP8EXT_FAULT"])
    try:
        while not (text := file.read_text()):  # it is being written
            time.sleep(0.001)
    except FileNotFoundError:
        return
    fault = json.loads(text)
    if (fault["point"], fault["rank"]) != (point, rank) or call <= fault.get("skip", 0):
        return
    if not fault["lasting"]:
        file.unlink()
    if fault["kind"] == "flipped bit":
        live, _ = where.pairs[-1]
        live[-1] ^= 4
    if fault["kind"] == "exception":
        raise RuntimeError("an injected fault")
    if fault["kind"] == "out of memory":
        import torch

        torch.empty(1 << 50, dtype=torch.uint8)
    if fault["kind"] == "kill -9":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault["kind"] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault["kind"] == "slow":
        time.sleep(fault["seconds"])
    if fault["kind"] == "hang":
        time.sleep(3600)
