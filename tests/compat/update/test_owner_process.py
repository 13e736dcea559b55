# SPDX-License-Identifier: Apache-2.0
"""Processes whose owner is killed, named as vLLM names them."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Looks = Callable[[int], bool]

PROGRAM = """
import multiprocessing, os, signal, subprocess, sys, time

def owned(told):
    from vllm_fp8ext.compat.update import owner_process as owner
    owner._WORKER_GRACE_SECONDS = 0.1
    owner.follow_as("EngineCore", owner._end_engine)
    owner.follow_engine()
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told.send(worker.pid)
    time.sleep(600)

if __name__ == "__main__":
    method, name, beside = sys.argv[1:]
    context = multiprocessing.get_context(method)
    heard, told = context.Pipe(duplex=False)
    process = context.Process(target=owned, args=(told,), name=name)
    process.start()
    told.close()
    pids = [process.pid, heard.recv()]
    if beside == "forked":
        child = os.fork()
        if not child:
            time.sleep(600)
        pids.append(child)
    print(*pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "owner.py"
    file.write_text(PROGRAM)
    return file


@contextlib.contextmanager
def killed(program: Path, *arguments: str) -> Iterator[list[int]]:
    """Processes whose owner was killed: the one that it owned, that one's worker, and what the owner had forked beside."""
    with subprocess.Popen(
        [sys.executable, "-P", str(program), *arguments], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        try:
            assert owner.wait(300) == -signal.SIGKILL
            yield pids
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("name", ["EngineCore", "EngineCore_DP1"])
def test_an_engine_ends_with_its_owner_and_its_workers_with_it(
    program: Path, ended: Looks, method: str, name: str
) -> None:
    with killed(program, method, name, "alone") as (engine, worker):
        assert ended(engine)
        assert ended(worker)


def test_what_the_owner_has_forked_keeps_no_engine(program: Path, ended: Looks, lives: Looks) -> None:
    """It holds the owner's end of the pipe."""
    with killed(program, "fork", "EngineCore", "forked") as (engine, worker, forked):
        assert ended(engine)
        assert ended(worker)
        assert lives(forked)


def test_a_worker_ends_when_its_engine_has(program: Path, ended: Looks) -> None:
    with killed(program, "fork", "VllmWorker-0", "alone") as (worker, _):
        assert ended(worker)


def test_a_trainers_own_processes_are_left_alone(program: Path, ended: Looks, lives: Looks) -> None:
    with (
        killed(program, "fork", "Process-1", "alone") as (process, worker),
        killed(program, "fork", "EngineCore", "alone") as (engine, _),
    ):
        assert ended(engine)
        assert lives(process)
        assert lives(worker)
