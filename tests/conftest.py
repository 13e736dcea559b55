# SPDX-License-Identifier: Apache-2.0
"""Leaves out what this machine has no hardware for, and interprets Triton's kernels where there is no GPU."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

FP8_KV = torch.cuda.is_available() or torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
"""Whether vLLM has an FP8 KV cache here."""
BESIDE = Path(sys.prefix) / "beside"
"""Where Triton and NCCL may lie where there is no GPU: out of sight of vLLM, which would import it without any use."""

FULL_SECONDS = 1800
"""For tests that are marked `full` and say nothing else, where other work has the machine."""

_STARTED = time.monotonic()
_ENDS = pytest.StashKey[float | None]()
"""When no more tests begin, by `time.monotonic`."""

# a busy machine is no reason to fail
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# vLLM would report each engine that a test starts
os.environ["VLLM_NO_USAGE_STATS"] = "1"
# an engine of one rank is one process, as it is on a GPU: on CPUs it would be two, or three with the one that asks for it
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
if torch.cuda.device_count() == 0:
    # before anything imports Triton, which reads it as its functions are declared
    os.environ["TRITON_INTERPRET"] = "1"
    if BESIDE.is_dir():
        sys.path.append(str(BESIDE))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run end in time."""
    parser.addoption(
        "--seconds", type=float, help="begin no test after so many seconds; the others are skipped"
    )
    parser.addoption("--turn", type=int, default=0, help="begin with that file, counted around")


def pytest_configure(config: pytest.Config) -> None:
    seconds = config.getoption("--seconds")
    config.stash[_ENDS] = None if seconds is None else _STARTED + seconds


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that the time does not suffice for, before its fixtures are made."""
    ends = item.config.stash[_ENDS]
    if ends is not None and time.monotonic() > ends:
        pytest.skip("no time is left")


@pytest.hookimpl(trylast=True)  # of the tests that the marks leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests for GPUs, or instructions of the CPU, that are not here."""
    gpus = torch.cuda.device_count()
    available = {"gpu": gpus >= 1, "multigpu": gpus >= 2, "fp8_kv": FP8_KV}
    lacking = [name for name, here in available.items() if not here]
    left_out = {item for item in items if any(map(item.get_closest_marker, lacking))}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    turn(items, config.getoption("--turn"))
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(FULL_SECONDS))


def turn(items: list[pytest.Item], by: int) -> None:
    """Have so many files come last that come first: what runs for a limited time gets to all of them in its turn."""
    files = list(dict.fromkeys(item.path for item in items))
    places = {path: (place - by) % len(files) for place, path in enumerate(files)}
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(scope="session")
def kv_dtype() -> str:
    """Of the KV cache of engines that are tried with an FP8 one where there is any."""
    return "fp8" if FP8_KV else "auto"


@pytest.fixture(scope="session")
def lives() -> Callable[[int], bool]:
    """Whether a process runs, which may be nobody's child any more."""

    def look(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    return look


@pytest.fixture(scope="session")
def ended(lives: Callable[[int], bool]) -> Callable[[int], bool]:
    """Whether a process ends within a time that a busy machine has, too."""

    def wait(pid: int) -> bool:
        until = time.monotonic() + 60
        while lives(pid) and time.monotonic() < until:
            time.sleep(0.05)
        return not lives(pid)

    return wait


@pytest.fixture
def on_a_small_disk(tmp_path: Path) -> Callable[[str, str], "subprocess.CompletedProcess[str]"]:
    """Runs a script, in a process of its own, with a folder as its argument that is a file system of this size."""
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]

    def run(size: str, script: str) -> "subprocess.CompletedProcess[str]":
        mounted = f'mount -t tmpfs -o size={size} none "$0"'
        if subprocess.run([*alone, mounted, str(tmp_path)], capture_output=True).returncode:
            pytest.skip("a small disk cannot be mounted here")
        line = [*alone, mounted + ' && exec "$@" "$0"', str(tmp_path), sys.executable, "-P", "-c", script]
        return subprocess.run(line, capture_output=True, text=True, timeout=300)

    return run
