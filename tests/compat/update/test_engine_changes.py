# SPDX-License-Identifier: Apache-2.0
"""Calls that an engine core answers when something has changed."""

from typing import Any

from vllm_fp8ext.compat.update.engine_changes import EngineChanges


def test_calls_are_answered_once_something_else_holds() -> None:
    current: dict[str, Any] = {"epoch": 0, "poisoned": None}
    changes = EngineChanges(lambda: dict(current))
    new, one, other = changes.wait(None), changes.wait(dict(current)), changes.wait({"epoch": 7})
    assert new.result(0) == other.result(0) == current
    changes.tell()
    assert not one.done()
    current["poisoned"] = "a fault"
    changes.tell()
    assert one.result(0) == current
    changes.tell()
