# SPDX-License-Identifier: Apache-2.0
"""How a server's processes end that is killed, what the next one finds of it, and what becomes of requests when that one is
told to end. One scenario, since each ending costs a server."""

import json
import os
import re
import secrets
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from vllm_fp8ext.demo.server import MODEL
from vllm_fp8ext.shared_memory import FOLDER

from .ask import Stream
from .fault_cells import GRACE_SECONDS, PATIENT_SECONDS, FaultyServer

SHUTDOWN_SECONDS = 20
pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(1200)]


def test_a_killed_server_its_shared_memory_and_a_server_that_is_told_to_end(
    tmp_path: Path, ended: Callable[[int], bool]
) -> None:
    bystander = Path(FOLDER, f"psm_{secrets.token_hex(4)}")
    bystander.touch()
    try:
        with FaultyServer(tmp_path, 2, deadline_seconds=PATIENT_SECONDS) as server:
            server.wait()
            left = _killed(server, ended)  # any engine that starts on this machine meanwhile removes them
        told = ("--shutdown-timeout", str(SHUTDOWN_SECONDS))
        with FaultyServer(tmp_path, 1, False, *told, deadline_seconds=PATIENT_SECONDS) as server:
            server.wait()
            assert not any(segment.exists() for segment in left)
            assert bystander.exists()
            _told_to_end(server)
    finally:
        bystander.unlink()


def _killed(server: FaultyServer, ended: Callable[[int], bool]) -> list[Path]:
    """Kill a server while it answers. Engine and workers end by themselves. Returns the segments that it leaves."""
    stream = Stream(server)
    children = psutil.Process(server.process.pid).children(recursive=True)
    maps = "".join(Path(f"/proc/{child.pid}/maps").read_text() for child in children)
    segments = {Path(name) for name in re.findall(rf"{FOLDER}/psm_\w+$", maps, re.MULTILINE)}
    assert len(segments) >= 2
    for child in children:
        if "resource_tracker" in " ".join(child.cmdline()):  # it would tidy up
            child.kill()
    server.process.kill()
    assert all(ended(child.pid) for child in children)
    stream.wait()
    return sorted(segments)


def _told_to_end(server: FaultyServer) -> None:
    """Requests that end in the grace period are answered as ever, each of the others with an error."""
    slow = {"point": "step", "kind": "slow", "rank": 0, "lasting": True, "seconds": 0.05}
    server.fault.write_text(json.dumps(slow))
    body = {"model": MODEL, "prompt": "12+34=", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=300))

    waiting = threading.Thread(target=ask)
    waiting.start()
    long, short = Stream(server, tokens=1900), Stream(server, tokens=30)
    os.kill(server.process.pid, signal.SIGTERM)
    seconds = SHUTDOWN_SECONDS + GRACE_SECONDS
    short.wait(seconds)
    assert (short.finish, len(short.token_ids)) == ("length", 30)
    long.wait(seconds)
    waiting.join(seconds)
    assert [answer.status_code for answer in answers] == [500], [answer.text for answer in answers]
    assert "error" in (long.finish or "").lower(), long.finish
    assert server.process.wait(seconds) == 0
