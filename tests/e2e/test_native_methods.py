# SPDX-License-Identifier: Apache-2.0
"""The weight transfer methods of `LLM` and `AsyncLLM` go the way of the routes."""

from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .scenarios import SECONDS, run_scenario

pytestmark = pytest.mark.timeout(SECONDS + 60)


def facts_of(way: str, folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = run_scenario("native_methods_scenario.py", folder, way)
    assert facts["digests"] == checkpoint_digests(LATE)
    assert (facts["version"], facts["epoch"]) == ("late", 1)
    return facts


def test_an_llm_in_the_trainers_process(tmp_path: Path) -> None:
    facts = facts_of("LLM", tmp_path)
    assert (facts["draft"], facts["too early"]) == ("no-draft-model", "no-update")
    assert facts["renamed"] == "again"


@pytest.mark.full
def test_an_async_llm_beside_a_session_of_updates(tmp_path: Path) -> None:
    facts = facts_of("AsyncLLM", tmp_path)
    assert "was refused" in facts["of a worker"]
