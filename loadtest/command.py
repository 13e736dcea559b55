# SPDX-License-Identifier: Apache-2.0
"""locust's command line for a load test."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def command(
    url: str, profile: str, users: int, run_time: str, web: bool, arguments: Sequence[str]
) -> list[str]:
    """What to run; `arguments` are passed on.

    Raises:
        ModuleNotFoundError: locust is not installed.
    """
    if importlib.util.find_spec("locust") is None:
        raise ModuleNotFoundError(name="locust")
    line = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url]
    if not web:
        line += ["--headless", "--only-summary", "--run-time", run_time]
    line += ["--traffic", profile]
    if profile != "closed":
        users = _processes(arguments)  # one of each process sends
    return [*line, "--users", str(users), "--spawn-rate", str(users), *arguments]


def _processes(arguments: Sequence[str]) -> int:
    """As locust takes them: apart or by an equals sign, -1 for as many as there are cores."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    given = [after for before, after in pairwise(words) if before == "--processes"]
    if not given or not given[-1].lstrip("-").isdigit():
        return 1
    count = int(given[-1])
    return count if count > 0 else os.cpu_count() or 1
