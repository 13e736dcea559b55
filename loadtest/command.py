# SPDX-License-Identifier: Apache-2.0
"""locust's command line for a load test."""

import importlib.util
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from vllm_fp8ext.errors import ConfigError

LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def command(
    url: str, profile: str, users: int, run_time: str, web: bool, arguments: Sequence[str]
) -> list[str]:
    """What to run; `arguments` are passed on.

    Raises:
        ConfigError: locust is not installed.
    """
    if importlib.util.find_spec("locust") is None:
        raise ConfigError("load tests need locust: pip install 'vllm-fp8ext[loadtest]'")
    line = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url]
    if not web:
        line += ["--headless", "--only-summary", "--run-time", run_time]
    line += ["--traffic", profile]
    if profile != "closed":
        users = _processes(arguments)  # one of each process sends
    return [*line, "--users", str(users), "--spawn-rate", str(users), *arguments]


def _processes(arguments: Sequence[str]) -> int:
    given = [after for before, after in pairwise(arguments) if before == "--processes"]
    return int(given[-1]) if given and given[-1].isdigit() else 1
