# SPDX-License-Identifier: Apache-2.0
"""The watchdog in a process of its own, which it may end."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from vllm_fp8ext.compat.update.watchdog import EXIT_CODE

PROGRAM = """
import os, sys, threading, time
from types import SimpleNamespace
from vllm_fp8ext.compat.update.watchdog import Watchdog

worker = SimpleNamespace(proc=SimpleNamespace(pid=int(sys.argv[1])))
executor = SimpleNamespace(workers=[SimpleNamespace(), SimpleNamespace(proc=None), worker])
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def run(worker: subprocess.Popen[bytes], program: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", PROGRAM + program, str(worker.pid)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_an_operation_that_overruns_ends_engine_and_workers(worker: subprocess.Popen[bytes]) -> None:
    done = run(
        worker,
        """
def hanging():
    with Watchdog(0.1, executor).watching("digests"):
        threading.Event().wait()
hanging()
""",
    )
    assert done.returncode == EXIT_CODE
    assert worker.wait(300) == -9
    assert "hanging" in done.stderr, "every thread's stack is told"


def test_the_reason_is_logged(worker: subprocess.Popen[bytes]) -> None:
    done = run(
        worker,
        """
with Watchdog(0.1, executor).watching("digests"):
    threading.Event().wait()
""",
    )
    assert "digests was not done within 0.1 s" in done.stderr


def test_operations_that_are_done_in_time_are_left_alone(worker: subprocess.Popen[bytes]) -> None:
    """Its clock is set ahead while nothing is watched; it looks once a second at least, and costs nothing meanwhile."""
    done = run(
        worker,
        """
watchdog = Watchdog(1000, executor)
for _ in range(3):
    with watchdog.watching("status"):
        pass
try:
    with watchdog.watching("commit"):
        raise ValueError
except ValueError:
    pass
real, ahead = time.monotonic, 0
time.monotonic = lambda: real() + ahead
ahead = 5000
spent = time.process_time()
time.sleep(1.5)
with watchdog.watching("status"):
    time.sleep(1.5)
assert time.process_time() - spent < 0.5
print("alive")
""",
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    assert worker.poll() is None


def test_a_later_operation_is_watched_too(worker: subprocess.Popen[bytes]) -> None:
    done = run(
        worker,
        """
watchdog = Watchdog(1000, executor)
with watchdog.watching("status"):
    pass
watchdog.seconds = 0.1
with watchdog.watching("commit"):
    threading.Event().wait()
""",
    )
    assert done.returncode == EXIT_CODE
    assert "commit was not done" in done.stderr
    assert worker.wait(300) == -9


@pytest.mark.parametrize(("then", "code"), [("time.sleep(0.1)", 0), ("threading.Event().wait()", EXIT_CODE)])
def test_it_rests_while_others_are_waited_for(worker: subprocess.Popen[bytes], then: str, code: int) -> None:
    """The watched call has all its time again afterwards."""
    done = run(
        worker,
        f"""
watchdog = Watchdog(1000, executor).another()
real, ahead = time.monotonic, 0
time.monotonic = lambda: real() + ahead
with watchdog.watching("commit"):
    with watchdog.resting():
        ahead = 5000
        time.sleep(1.5)
    watchdog.seconds = 20 if {code} == 0 else 0.5
    with watchdog.resting():
        pass
    {then}
""",
    )
    assert done.returncode == code, done.stderr


def test_an_engine_that_is_out_of_step_is_ended_at_once(worker: subprocess.Popen[bytes]) -> None:
    done = run(worker, 'Watchdog(1000, executor).end("call 7 was answered by call 6")')
    assert done.returncode == EXIT_CODE
    assert "call 7 was answered by call 6" in done.stderr
    assert worker.wait(300) == -9


@pytest.mark.parametrize(
    "trouble",
    [
        "executor.workers.insert(0, SimpleNamespace(proc=SimpleNamespace(pid=gone.pid)))",
        "sys.stderr = io.StringIO()",
        "sys.stderr = None",
    ],
    ids=["a worker that is gone", "stderr without a file", "no stderr"],
)
def test_nothing_keeps_it_from_ending(worker: subprocess.Popen[bytes], trouble: str) -> None:
    done = run(
        worker,
        f"""
import io, subprocess
gone = subprocess.Popen([sys.executable, "-c", ""])
gone.wait()
{trouble}
watchdog = Watchdog(0.1, executor)
with watchdog.watching("commit"):
    watchdog._thread.join(300)
print("alive")
""",
    )
    assert (done.returncode, done.stdout) == (EXIT_CODE, "")
    assert worker.wait(300) == -9


def test_an_engine_without_worker_processes_is_ended(worker: subprocess.Popen[bytes]) -> None:
    """One rank runs in the engine's own process."""
    done = run(worker, 'Watchdog(1000, object()).end("out of step")')
    assert done.returncode == EXIT_CODE
    assert worker.poll() is None
