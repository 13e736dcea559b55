# SPDX-License-Identifier: Apache-2.0
"""Updates of a server whose workers are Ray's actors (`--distributed-executor-backend ray`).

vLLM's CPU platform has no name for Ray's resource: `ray_cpu_platform` gives it one.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .ask import complete
from .conftest import OPTIONS
from .plugins import HERE, variables

RAY = Path(sys.prefix) / "ray"
"""Folder of Ray, out of sight of vLLM."""
SECONDS = 300.0
pytestmark = [
    pytest.mark.full,
    pytest.mark.alone,
    pytest.mark.skipif(
        not RAY.is_dir(), reason=f"needs Ray: pip install --no-deps --target {RAY} ray==2.60.0"
    ),
]


class RayServer(Server):
    """Imports vLLM anew: elsewhere servers are forked from a process that has imported it without Ray."""

    popen = subprocess.Popen


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of a server that finds a Ray cluster of this machine, with two "GPUs"."""
    folder = tmp_path_factory.mktemp("ray")
    made = variables(folder, ranks=2)
    metadata = folder / "platform" / "fp8ext_ray-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8ext-ray\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.platform_plugins]\nfp8ext_ray = fp8ext_ray:platform\n")
    for module in ("fp8ext_ray", "ray_cpu_platform"):
        (folder / "platform" / f"{module}.py").write_bytes((HERE / f"{module}.py").read_bytes())
    made["PYTHONPATH"] = os.pathsep.join([str(folder / "platform"), str(RAY), made["PYTHONPATH"]])
    made["VLLM_PLUGINS"] += ",fp8ext_ray"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": f"127.0.0.1:{port}"}
    made |= {"RAY_worker_niceness": "0", "RAY_DEDUP_LOGS": "0"}
    short = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets have little room
    options = ["--head", "--block", "--num-gpus", "2", "--num-cpus", "2", "--port", str(port)]
    options += ["--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", short]
    options += ["--object-store-memory", str(100 << 20)]
    line = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *options]
    own = {name: value for name, value in (os.environ | made).items() if name != "RAY_ADDRESS"}
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(line, env=own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until = time.monotonic() + 600
        while "Ray runtime started" not in (folder / "head.log").read_text(errors="replace"):
            assert head.poll() is None, (folder / "head.log").read_text(errors="replace")
            assert time.monotonic() < until, "Ray does not start"
            time.sleep(0.5)
        yield made
    finally:
        head.terminate()
        try:
            head.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_actors_take_updates_and_a_killed_one_ends_the_server(
    environment: dict[str, str], tmp_path: Path, ranks: int
) -> None:
    arguments = (*OPTIONS, "--tensor-parallel-size", str(ranks), "--distributed-executor-backend", "ray")
    own = dict(environment)
    if ranks == 1:
        del own["VLLM_CPU_OMP_THREADS_BIND"]
    with RayServer(EARLY, tmp_path / "log", arguments=arguments, variables=own) as server:
        server.wait(SECONDS)
        with server.client() as client:
            manifest = Manifest.from_dict(client.manifest())
            for epoch, folder in enumerate((LATE, EARLY, LATE), 1):
                client.push(folder, version=folder.name)
                assert client.digests().digests == checkpoint_digests(folder, manifest)
                assert client.verify().epoch == epoch
            assert client.verify().ranks == ranks
            assert client.rollback().version == "early"
        complete(server, "12+34=")
        workers = _workers(server, ranks)
        os.kill(int(workers.pop()), signal.SIGKILL)
        assert server.process.wait(SECONDS) != 0


def _workers(server: Server, ranks: int) -> set[str]:
    """Return the processes of all ranks: Ray brings their lines into the log a while after they were written."""
    until = time.monotonic() + 60
    while True:
        workers = set(re.findall(r"RayWorkerProc pid=(\d+)", server.log.read_text(errors="replace")))
        if len(workers) == ranks:
            return workers
        assert time.monotonic() < until, workers
        time.sleep(0.2)
