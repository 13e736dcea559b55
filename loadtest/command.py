# SPDX-License-Identifier: Apache-2.0
"""locust's command line for a load test."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
LOOPBACK = "127.0.0.1"
PACKAGES = "locust", "hdrh", "plotly", "prometheus_client"
"""Modules that the extra `loadtest` brings: locust itself tells only by a traceback what its file lacks."""


def command(
    url: str, profile: str, users: int, run_time: str, web: bool, arguments: Sequence[str]
) -> list[str]:
    """Return the command line of locust, with `arguments` passed on. Where these say nothing else, only this machine reaches
    what locust opens: its page starts load tests for anybody, with the keys of whoever started locust.

    Raises:
        ModuleNotFoundError: locust, or what our file for it imports, is not installed.
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
    line = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url]
    if not web:
        line += ["--headless", "--only-summary", "--run-time", run_time]
    elif not _given(arguments, "--web-host"):
        line += ["--web-host", LOOPBACK]
    if _given(arguments, "--processes") and not _given(arguments, "--master-bind-host"):
        line += ["--master-bind-host", LOOPBACK]
    line += ["--traffic", profile]
    if profile != "closed":
        users = _processes(arguments)  # one of each process sends
    return [*line, "--users", str(users), "--spawn-rate", str(users), *arguments]


def _processes(arguments: Sequence[str]) -> int:
    """As locust takes them: apart or by an equals sign, -1 for as many as there are cores."""
    counts = _given(arguments, "--processes")
    if not counts or not counts[-1].lstrip("-").isdigit():
        return 1
    count = int(counts[-1])
    return count if count > 0 else os.cpu_count() or 1


def _given(arguments: Sequence[str], option: str) -> list[str]:
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return [after for before, after in pairwise(words) if before == option]
