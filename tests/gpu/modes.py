# SPDX-License-Identifier: Apache-2.0
"""Scenarios that engines tell in several modes, all at once on one GPU."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any


def told(
    name: str, modes: Sequence[str], model: Path, folder: Path, *, own_kernels: bool = False
) -> list[Any]:
    """What the scenario of this folder writes down in each mode. With `own_kernels` each has a folder of DeepGEMM's, which
    can be counted: compiled in the first mode, ahead of the others."""
    for wave in (modes[:1], modes[1:]) if own_kernels else (modes,):
        running = []
        for mode in wave:
            environment = dict(os.environ)
            if own_kernels:
                environment["DG_JIT_CACHE_DIR"] = str(_kernels(folder, mode, modes[0]))
            line = [sys.executable, "-P", str(Path(__file__).with_name(name)), mode, str(model)]
            line.append(str(folder / f"{mode}.json"))
            with (folder / f"{mode}.log").open("w") as log:
                running.append(subprocess.Popen(line, stdout=log, stderr=log, env=environment))
        for process, mode in zip(running, wave, strict=True):
            assert process.wait(900) == 0, (folder / f"{mode}.log").read_text()[-4000:]
    return [json.loads((folder / f"{mode}.json").read_text()) for mode in modes]


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
