# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPO with LoRA, on answers of a server that serves what was trained: three steps, four pushes."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.environment import ADMIN_KEY
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .plugins import HERE

PROJECT = Path(__file__).parents[2]
TRAINERS = Path(sys.prefix) / "trainers"
"""Where TRL lies, out of sight of vLLM."""
SECONDS = 1500
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(SECONDS + 300),
    pytest.mark.skipif(not TRAINERS.is_dir(), reason="needs TRL: scripts/setup_env.py --beside"),
]


def environment() -> dict[str, str]:
    """Variables of a process that has TRL."""
    path = os.pathsep.join(filter(None, [str(TRAINERS), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}


def trained(server: Server, folder: Path) -> dict[str, Any]:
    """What `trl_scenario` saw."""
    facts, log = folder / "facts.json", folder / "log"
    line = [
        sys.executable,
        "-P",
        str(HERE / "trl_scenario.py"),
        str(facts),
        server.url,
        server.key,
        str(folder),
    ]
    with log.open("wb") as file:
        done = subprocess.run(line, env=environment(), stdout=file, stderr=subprocess.STDOUT, timeout=SECONDS)
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
    loaded: dict[str, Any] = json.loads(facts.read_text())
    return loaded


def test_merged_weights_of_each_step_are_served(single: Server, tmp_path: Path) -> None:
    """TRL merges the adapters, yields the parameters, and takes the adapters out again."""
    facts = trained(single, tmp_path)
    with single.client() as client:
        manifest = Manifest.from_dict(client.manifest())
    pushes = facts["pushes"]
    assert (facts["steps"], len(pushes)) == (3, 4)
    for push in pushes:
        wanted = checkpoint_digests(tmp_path / f"{push['version']}.safetensors", manifest)
        assert push["digests"] == wanted, push["version"]
        assert (push["verified"], push["taken out again"]) == (push["version"], True)
    for push, following in itertools.pairwise(pushes):
        assert following["digests"] != push["digests"], "nothing was trained"
        assert following["epoch"] == push["epoch"] + 1
    assert sorted(set(facts["answered by"])) == ["step-0", "step-1", "step-2"]


def test_the_example_trains(single: Server, tmp_path: Path) -> None:
    with single.client() as client:
        epoch = client.weights().epoch
    done = subprocess.run(
        [sys.executable, "-P", str(PROJECT / "examples" / "trl_grpo.py"), single.url],
        env=environment() | {ADMIN_KEY: single.key},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.splitlines()[-1] == f"epoch {epoch + 2} is served, version epoch-{epoch + 2}"
