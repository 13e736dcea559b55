# SPDX-License-Identifier: Apache-2.0
"""Scenarios: scripts of this folder that hold engines in their own process, as a trainer does, and record what they saw."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from forked_python.processes import run

from .plugins import HERE, variables
from .vision import with_vision

SECONDS = 1800
"""For a scenario, and little less than for its test: many, where other work has the machine."""


def run_scenario(
    name: str, folder: Path, *more: str, seconds: float = SECONDS, ends: int = 0, vision: bool = False
) -> Any:
    """What a scenario, given a file for it and the arguments `more`, writes down there; its log is beside it. `ends`: its
    code. `vision`: it reads images."""
    facts, log, code = folder / "facts.json", folder / "log", None
    line = [sys.executable, "-P", str(HERE / name), str(facts), *more]
    own = {**os.environ, **variables(folder)}
    own = with_vision(own) if vision else own
    with log.open("wb") as file, contextlib.suppress(subprocess.TimeoutExpired):
        code = run(line, env=own, stdout=file, stderr=subprocess.STDOUT, timeout=seconds).returncode
    assert code == ends, log.read_text(errors="replace")[-6000:]
    return json.loads(facts.read_text())
