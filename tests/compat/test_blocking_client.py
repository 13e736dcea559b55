# SPDX-License-Identifier: Apache-2.0
"""What an `LLM` must be like for its weights to be updated. (Calls of a real one: tests/e2e/test_embedded.py.)"""

from types import SimpleNamespace

import pytest
from vllm.v1.engine.core_client import InprocClient

from vllm_fp8ext.compat.blocking_client import BlockingEngine
from vllm_fp8ext.errors import ConfigError


def test_an_engine_core_in_the_trainers_thread_is_refused() -> None:
    core = InprocClient.__new__(InprocClient)
    with pytest.raises(ConfigError, match=r"InprocClient.*leave VLLM_ENABLE_V1_MULTIPROCESSING at 1"):
        BlockingEngine(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
