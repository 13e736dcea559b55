# SPDX-License-Identifier: Apache-2.0
"""What two engines with an FP8 KV cache told, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def _told(kind: str, factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = factory.mktemp(kind) / "facts.json"
    story = Path(__file__).with_name("kv_story.py")
    line = [sys.executable, "-P", str(story), kind, str(file)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {"kind": kind, **json.loads(file.read_text())}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the early checkpoint (`kv_story`)."""
    return _told("plain", tmp_path_factory)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a model with three KV cache groups, two of which look at a window."""
    return _told("hybrid", tmp_path_factory)


@pytest.fixture(params=["plain", "hybrid"])
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of each of them."""
    found: dict[str, Any] = request.getfixturevalue(request.param)
    return found
