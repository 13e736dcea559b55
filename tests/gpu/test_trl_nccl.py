# SPDX-License-Identifier: Apache-2.0
"""TRL's trainer, unmodified, over NCCL: on the server's GPU, or on one of its own."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

TRAINERS = Path(sys.prefix) / "trainers"
IDLE_SECONDS = 20.0
SECONDS = 500
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not TRAINERS.is_dir(), reason="needs TRL: scripts/setup_env.py --beside"),
]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    from vllm_fp8ext.bench.generated import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_checkpoint(path, "Qwen3-0.6B", 0, "cuda")
        yield path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = (
        *("--max-model-len", "512", "--max-num-seqs", "16", "--tokenizer", str(EARLY)),
        *("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(1 << 30)),
        *("--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs"),
    )
    log = tmp_path_factory.mktemp("trl") / "server.log"
    settings = {"upload_idle_seconds": IDLE_SECONDS}
    variables = {"CUDA_VISIBLE_DEVICES": gpus()[0], "NCCL_HOSTID": "the-server"}
    with Server(model, log, arguments=arguments, settings=settings, variables=variables) as started:
        started.wait(900)
        yield started


def gpus() -> list[str]:
    """The GPUs that this process sees, as the variable for them names them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return told.split(",") if told else [str(number) for number in range(torch.cuda.device_count())]


def trainer(server: Server, model: Path, folder: Path, way: str, gpu: str) -> tuple[int, Path]:
    """Exit code of a trainer, and the file in which it wrote what it saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(TRAINERS), os.environ.get("PYTHONPATH", "")]))
    more = {"PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    more |= {"CUDA_VISIBLE_DEVICES": gpu, "NCCL_HOSTID": "the-trainer", "GROUP_PORT": str(port)}
    more |= {"VLLM_HOST_IP": "127.0.0.1"}
    script, facts, log = (
        Path(__file__).with_name("trl_nccl_scenario.py"),
        folder / "facts.json",
        folder / "log",
    )
    line = [
        sys.executable,
        "-P",
        str(script),
        str(facts),
        server.url,
        server.key,
        str(model),
        str(folder),
        way,
    ]
    with log.open("wb") as file:
        done = subprocess.run(
            line, env=os.environ | more, stdout=file, stderr=subprocess.STDOUT, timeout=SECONDS
        )
    print(log.read_text(errors="replace")[-4000:])
    return done.returncode, facts


def digests(server: Server, checkpoint: Path) -> tuple[Any, Any]:
    """What is served, and what must be, of these weights."""
    with server.client() as client:
        manifest = Manifest.from_dict(client.manifest())
        return client.digests().digests, checkpoint_digests(checkpoint, manifest)


PLACES = [
    pytest.param(0, id="one GPU"),
    pytest.param(1, marks=pytest.mark.multigpu, id="two GPUs"),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["full", "lora"])
def test_three_steps(server: Server, model: Path, tmp_path: Path, way: str, place: int) -> None:
    code, facts = trainer(server, model, tmp_path, way, gpus()[place])
    assert code == 0
    assert json.loads(facts.read_text())["steps"] == 3
    served, expected = digests(server, tmp_path / "model.safetensors")
    assert served == expected
    assert served != digests(server, model)[1], "nothing was trained"


@pytest.mark.parametrize("place", PLACES)
def test_a_trainer_that_is_killed_in_a_broadcast(
    server: Server, model: Path, tmp_path: Path, place: int
) -> None:
    """Its first update is served, its second one never; one that is started again goes through."""
    code, _ = trainer(server, model, tmp_path, "killed", gpus()[place])
    assert code == -9
    until = time.monotonic() + 3 * IDLE_SECONDS
    with server.client() as client:
        while client.weights().update is not None:
            assert time.monotonic() < until, "the update was not given up"
            time.sleep(0.5)
    served, expected = digests(server, model)
    assert served == expected
    test_three_steps(server, model, tmp_path, "full", place)
