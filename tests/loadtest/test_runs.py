# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the load generator, as its users start them, against a server that does nothing but send tokens."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_fp8ext.loadtest.command import LOCUSTFILE

pytestmark = pytest.mark.alone
INTERVAL = 0.02


class Trivial:
    """The server, in a process of its own."""

    def __init__(self, port: int, *program: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        line = [sys.executable, *(program or ("-m", "vllm_fp8ext.loadtest.trivial")), "--port", str(port)]
        self.process = subprocess.Popen([*line, "--interval", str(INTERVAL)])
        for _ in range(200):
            try:
                httpx.get(f"{self.url}/version")
                return
            except httpx.HTTPError:
                time.sleep(0.05)
        pytest.fail("the trivial server did not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def trivial(unused_port: int) -> Iterator[Trivial]:
    server = Trivial(unused_port)
    yield server
    server.stop()


@pytest.fixture
def mortal(unused_port: int) -> Iterator[Trivial]:
    server = Trivial(unused_port, str(Path(__file__).with_name("mortal.py")))
    yield server
    server.stop()


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def load(url: str, folder: Path, *more: str, seconds: float = 300) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and output of `fp8ext bench load`."""
    line = [sys.executable, "-m", "vllm_fp8ext.cli", "bench", "load", "--url", url, "--report", str(folder)]
    done = subprocess.run([*line, *more], capture_output=True, text=True, timeout=seconds)
    report = folder / "report.json"
    return (
        done.returncode,
        json.loads(report.read_text()) if report.exists() else {},
        done.stdout + done.stderr,
    )


def test_a_closed_loop(trivial: Trivial, tmp_path: Path) -> None:
    lengths = ("--input-tokens", "uniform:3,9", "--output-tokens", "10")
    code, report, said = load(
        trivial.url, tmp_path, "--users", "4", "--time", "3s", *lengths, "--slo", "failed_requests<=0"
    )
    assert code in (0, 2), said  # a busy machine may hold up the generator, which then says so
    measured = report["measured"]
    good = measured["e2e"]["count"]
    assert good >= 8
    assert measured["itl"]["count"] == good * 9
    assert measured["ttft"]["p50"] >= INTERVAL
    assert measured["e2e"]["p50"] >= 10 * INTERVAL
    assert measured["unfinished_requests"] <= 4
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    assert "output tok/s" in said


def test_an_open_loop_of_several_processes_keeps_its_timetable(trivial: Trivial, tmp_path: Path) -> None:
    code, report, said = load(
        *(trivial.url, tmp_path, "--profile", "constant", "--rate", "20", "--users", "2", "--processes", "2"),
        *("--time", "6s", "--input-tokens", "5", "--output-tokens", "5"),
    )
    assert code in (0, 2), said
    measured = report["measured"]
    assert measured["requests"] <= 200
    assert code == 2 or 16 <= measured["achieved_rate"] <= 22, measured["seconds"]
    assert measured["failed_requests"] == 0
    assert measured["schedule_delay"]["count"] == measured["requests"]
    assert (code == 2) == bool(measured["invalid"])


def test_a_server_that_dies_in_mid_run(mortal: Trivial, tmp_path: Path) -> None:
    start = time.monotonic()
    code, report, said = load(
        *(
            mortal.url,
            tmp_path,
            "--users",
            "3",
            "--time",
            "7s",
            "--input-tokens",
            "5",
            "--output-tokens",
            "30",
        ),
        *("--slo", "failed_requests<=0"),
    )
    assert code in (1, 2), said
    assert time.monotonic() - start < 50
    errors = report["measured"]["errors"]
    assert errors["truncated"] >= 1
    assert errors["connect"] >= 1
    assert report["measured"]["e2e"]["count"] >= 1


@pytest.mark.parametrize("processes", [1, 2])
def test_rollout_steps_end_by_themselves(trivial: Trivial, tmp_path: Path, processes: int) -> None:
    code, report, said = load(
        *(
            trivial.url,
            tmp_path,
            "--profile",
            "rollout",
            "--rollout-steps",
            "3",
            "--prompts",
            "2",
            "--samples",
            "3",
        ),
        *("--input-tokens", "5", "--output-tokens", "uniform:3,20", "--time", "50s"),
        *(("--processes", str(processes)) if processes > 1 else ()),
    )
    assert code in (0, 2), said
    measured = report["measured"]
    assert measured["steps"]["count"] == 3
    assert measured["requests"] == measured["e2e"]["count"] == 18
    assert measured["schedule_delay"]["count"] == 18
    assert 0 < measured["steps"]["straggler_share"] < 1
    assert measured["seconds"] < 30


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--slo", "ttft<1"), "SLO: expected"),
        (("--input-tokens", "many"), "lengths: expected"),
        (("--update-every", "5"), "at least one"),
    ],
)
def test_what_is_wrong_with_the_options_is_said(
    trivial: Trivial, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    code, report, said = load(trivial.url, tmp_path, "--time", "2s", *more)
    assert code != 0
    assert report == {}
    assert message in said


def test_locust_alone_takes_the_file(trivial: Trivial) -> None:
    line = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(LOCUSTFILE),
        "--host",
        trivial.url,
        "--headless",
        "--users",
        "1",
    ]
    done = subprocess.run(
        [*line, "--run-time", "5s", "--output-tokens", "5"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode in (0, 2), done.stderr
    assert "time to first token" in done.stdout
