# SPDX-License-Identifier: Apache-2.0
"""Scenarios that engines tell in several modes, beside each other on one GPU."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

AT_ONCE = max(2, (os.cpu_count() or 4) // 4)
"""Engines that start beside each other. Each compiles with several processes."""


def told(
    name: str, modes: Sequence[str], model: Path, folder: Path, *, own_kernels: bool = False
) -> list[Any]:
    """What the scenario of this folder writes down in each mode. With `own_kernels` each has a folder of DeepGEMM's, which
    can be counted: compiled in the first mode, ahead of the others."""
    first, others = (modes[:1], modes[1:]) if own_kernels else ((), modes)
    waves = (others[start : start + AT_ONCE] for start in range(0, len(others), AT_ONCE))
    for wave in (first, *waves):
        with contextlib.ExitStack() as stack:
            running = []
            for mode in wave:
                environment = dict(os.environ)
                if own_kernels:
                    environment["DG_JIT_CACHE_DIR"] = str(_kernels(folder, mode, modes[0]))
                line = [sys.executable, "-P", str(Path(__file__).with_name(name)), mode, str(model)]
                line.append(str(folder / f"{mode}.json"))
                log = stack.enter_context((folder / f"{mode}.log").open("w"))
                process = subprocess.Popen(
                    line, stdout=log, stderr=log, env=environment, start_new_session=True
                )
                stack.callback(_end, process)
                running.append(process)
            for process, mode in zip(running, wave, strict=True):
                assert process.wait(900) == 0, (folder / f"{mode}.log").read_text()[-4000:]
    return [json.loads((folder / f"{mode}.json").read_text()) for mode in modes]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a scenario that still runs, with its engine."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _kernels(folder: Path, mode: str, first: str) -> Path:
    """The folder of one mode's kernels, with all those of the first mode."""
    kernels = folder / f"{mode}-kernels"
    if mode != first:
        shutil.copytree(folder / f"{first}-kernels", kernels)
    return kernels


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Mean difference of the tokens' log-probabilities."""
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return mean(abs(a - b) for first, second in pairs for a, b in zip(first, second, strict=True))
