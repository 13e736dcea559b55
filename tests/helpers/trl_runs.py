# SPDX-License-Identifier: Apache-2.0
"""Runs of TRL's trainers against a server, each in a process of its own: `trl_transfer_scenario`, on a CPU or a GPU."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

TRAINERS = Path(sys.prefix) / "trainers"
"""Where TRL lies, out of sight of vLLM."""
SCENARIO = Path(__file__).parents[1] / "e2e" / "trl_transfer_scenario.py"
WAYS = [("grpo", "full"), ("async", "full"), ("async", "lora")]
"""Trainers, and what they train.

`GRPOTrainer` sends no merged adapters by vLLM's packed broadcasts: it takes them out before the last bucket is packed.
"""


@dataclass(frozen=True)
class Runs:
    """Trainers of one server. `model`: the checkpoint that it was started with; `seconds`: time that each may take;
    `variables`: environment of the trainers."""

    server: Server
    model: Path
    seconds: float
    variables: dict[str, str]

    def run(self, folder: Path, trainer: str, way: str) -> tuple[int, dict[str, Any]]:
        """Exit code of a trainer, and what it saw: nothing, if it was killed."""
        folder.mkdir(parents=True, exist_ok=True)
        facts, log = folder / "facts.json", folder / "log"
        path = os.pathsep.join(filter(None, [str(TRAINERS), os.environ.get("PYTHONPATH", "")]))
        more = {"PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
        more |= {"VLLM_HOST_IP": "127.0.0.1", "GROUP_PORT": str(_free_port())}
        line = [sys.executable, "-P", str(SCENARIO), str(facts), self.server.url, self.server.key]
        line += [str(self.model), str(folder), trainer, way]
        with log.open("wb") as file:
            process = subprocess.Popen(
                line,
                env=os.environ | more | self.variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(self.seconds)
            finally:  # a killed trainer leaves the process that generates for it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        print(log.read_text(errors="replace")[-4000:])
        return code, json.loads(facts.read_text()) if facts.exists() else {}

    def three_steps(self, folder: Path, trainer: str, way: str) -> dict[str, Any]:
        """What a trainer saw whose merged weights are served after its three steps."""
        code, facts = self.run(folder, trainer, way)
        assert code == 0
        assert facts["steps"] == 3
        assert self.served() == self.digests(folder / "model.safetensors")
        assert self.served() != self.first_digests(), "nothing was trained"
        seconds = facts["update seconds"]
        assert len(seconds) >= 3
        print(
            trainer, way, "seconds from start to the answer of finish:", *(f"{each:.3f}" for each in seconds)
        )
        return facts

    def killed_and_started_again(self, folder: Path, trainer: str, idle_seconds: float) -> None:
        """A trainer's first update is served, its second one never; one that is started again goes through."""
        code, _ = self.run(folder / "killed", trainer, "killed")
        assert code == -signal.SIGKILL
        until = time.monotonic() + 3 * idle_seconds
        with self.server.client() as client:
            while client.weights().update is not None:
                assert time.monotonic() < until, "the update was not given up"
                time.sleep(0.5)
        assert self.served() == self.first_digests()
        self.three_steps(folder / "again", trainer, "full")

    def served(self) -> Any:
        with self.server.client() as client:
            return client.digests().digests

    def digests(self, checkpoint: Path) -> Any:
        """What must be served of a checkpoint."""
        with self.server.client() as client:
            return checkpoint_digests(checkpoint, Manifest.from_dict(client.manifest()))

    def first_digests(self) -> Any:
        """Return the digests of the server's first checkpoint, which are computed once."""
        if self.model not in _FIRST:
            _FIRST[self.model] = self.digests(self.model)
        return _FIRST[self.model]


_FIRST: dict[Path, Any] = {}
"""Digests by checkpoint."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
