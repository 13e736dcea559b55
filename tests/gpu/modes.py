# SPDX-License-Identifier: Apache-2.0
"""Stories that engines tell in several modes, all at once on one GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any


def told(
    name: str, modes: Sequence[str], model: Path, folder: Path, *, own_kernels: bool = False
) -> list[Any]:
    """What the story of this folder writes down in each mode. With `own_kernels` DeepGEMM's are compiled for each anew: they
    can be counted."""
    running = []
    for mode in modes:
        line = [sys.executable, "-P", str(Path(__file__).with_name(name)), mode, str(model)]
        own = {"DG_JIT_CACHE_DIR": str(folder / f"{mode}-kernels")} if own_kernels else {}
        with (folder / f"{mode}.log").open("w") as log:
            running.append(
                subprocess.Popen(
                    [*line, str(folder / f"{mode}.json")], stdout=log, stderr=log, env={**os.environ, **own}
                )
            )
    for process, mode in zip(running, modes, strict=True):
        assert process.wait(900) == 0, (folder / f"{mode}.log").read_text()[-4000:]
    return [json.loads((folder / f"{mode}.json").read_text()) for mode in modes]


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Mean difference of the tokens' log-probabilities."""
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return mean(abs(a - b) for first, second in pairs for a, b in zip(first, second, strict=True))
