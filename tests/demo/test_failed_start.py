# SPDX-License-Identifier: Apache-2.0
"""What is told of a server that does not start."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.demo.server import Server

LOG = (
    "import sys; print('(EngineCore) ValueError: Free memory is less than desired'); "
    "print('(EngineCore) CRITICAL 12-01 fp8ext: open was not done within 15 s: the engine ends'); "
    "print('\\n'.join(f'  frame {i}' for i in range(40))); sys.exit(1)"
)


class FailingServer(Server):
    """A server whose engine tells its error long before the end of the log."""

    @staticmethod
    def popen(line: Any, **options: Any) -> Any:
        return subprocess.Popen([sys.executable, "-c", LOG], **options)


def test_the_first_error_is_told_however_long_the_log_is(tmp_path: Path) -> None:
    with (
        FailingServer(tmp_path, tmp_path / "log") as server,
        pytest.raises(RuntimeError, match=r"code 1:\n\(EngineCore\) ValueError: Free memory") as raised,
    ):
        server.wait()
    assert "CRITICAL 12-01 fp8ext: open was not done within 15 s" in str(raised.value)
    assert server.what_went_wrong().endswith("  frame 39")
