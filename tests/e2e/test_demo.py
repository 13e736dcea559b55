# SPDX-License-Identifier: Apache-2.0
"""`fp8ext demo` itself, and that it tells when something is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from forked_python.processes import run

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.demo import run as demo


@pytest.mark.alone
def test_demo(tmp_path: Path):
    results = tmp_path / "demo.json"
    line = [
        sys.executable,
        "-P",
        "-m",
        "vllm_fp8ext.cli",
        "demo",
        "--problems",
        "80",
        "--json",
        str(results),
    ]
    done = run(line, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert found["ok"]
    assert len(found["rows"]) == 12
    assert found["accuracy"]["before"]["fp8"] < 0.5
    assert found["accuracy"]["after"]["fp8"] > 0.98
    assert [span["version"] for span in found["weight_versions"]] == ["epoch-0", "late"]


@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        pytest.param(["calibrate", str(EARLY), "--out", "calibrated"], marks=pytest.mark.full),
    ],
)
def test_a_command_that_is_told_to_end_leaves_nothing(command: list[str], tmp_path: Path) -> None:
    """As `timeout` and CI jobs that are cancelled do."""
    line = [sys.executable, "-P", "-m", "vllm_fp8ext.cli", *command]
    folders, environment = tmp_path / "tmp", {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    folders.mkdir()
    process = subprocess.Popen(line, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    started: list[psutil.Process] = []
    try:
        while not started:  # importing takes seconds, and minutes beside busy servers
            assert process.poll() is None
            time.sleep(0.05)
            if list(folders.glob("fp8ext-*")):  # an import may have had a child before
                started = psutil.Process(process.pid).children()
        assert list(folders.glob("fp8ext-*"))
        process.terminate()
        # the interpreter's own code where it was importing: it tells such an interrupt by SIGINT, whatever caught it
        assert process.wait(300) in (1, -signal.SIGINT)
    finally:
        process.kill()
        process.wait()
    assert not psutil.wait_procs(started, 300)[1]
    assert not list(folders.glob("fp8ext-*"))


def test_exit_code_when_a_row_is_not_ok(monkeypatch, capsys):
    monkeypatch.setattr(
        demo, "_run", lambda count, folder, report, console: report.add("a row", "found", False)
    )
    assert demo.run(1, None) == 1
    assert "NOT OK" in capsys.readouterr().out


def test_exit_code_when_a_server_does_not_start(monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise RuntimeError("the server ended with code 1")

    monkeypatch.setattr(demo, "_run", fail)
    assert demo.run(1, None) == 1
    assert "ended with code 1" in capsys.readouterr().out
