# SPDX-License-Identifier: Apache-2.0
"""Calls on the workers of an engine core, in whatever process that is."""

from types import SimpleNamespace

import pytest
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor import UniProcExecutor

from vllm_fp8ext.compat.update.load_calls import attach


@pytest.mark.parametrize(("kind", "ends"), [(EngineCoreProc, True), (EngineCore, False)])
def test_a_stalled_call_ends_an_engine_that_has_a_process_of_its_own(
    kind: type[EngineCore], ends: bool
) -> None:
    """Not the trainer's process. Either way the call may begin in this process."""
    loads = SimpleNamespace(around=None, may_end=None)
    core, executor = kind.__new__(kind), UniProcExecutor.__new__(UniProcExecutor)
    executor.driver_worker = SimpleNamespace(fp8ext_rank=SimpleNamespace(loads=loads))
    core.model_executor = executor
    attach(core, lambda core: None)
    assert loads.may_end is ends
    assert loads.around is not None
