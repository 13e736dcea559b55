# SPDX-License-Identifier: Apache-2.0
"""What a turn of an engine is told as."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fp8ext.bench import turns
from vllm_fp8ext.bench.engines import EngineError
from vllm_fp8ext.bench.steady import Window


def engine(window: Window) -> Any:
    return SimpleNamespace(name="blockfp8", steady=lambda load: [window])


def test_a_step_in_a_steady_state_gives_each_running_request_a_token() -> None:
    result = turns.steady(engine(Window(2.0, 400, 1, 4.0)), (4, 8, 6), 2.0)
    assert result == {"tokens_per_s": 200, "ms_per_step": 20, "running": 4, "preemptions": 1}


def test_a_window_without_a_token_is_no_measurement() -> None:
    with pytest.raises(EngineError, match=r"blockfp8: expected tokens within 0\.010 s, found none"):
        turns.steady(engine(Window(0.01, 0, 0, 0.0)), (4, 8, 6), 0.01)
