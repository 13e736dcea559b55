# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers over NCCL: on the server's GPU, or on one of their own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from trl_runs import TRAINERS, WAYS, Runs

from vllm_fp8ext.bench.layouts import visible_gpus
from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.demo.server import MODEL, Server

IDLE_SECONDS = 20.0
SECONDS = 400
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
        write_checkpoint(path, "Qwen3-1.7B", 0, "cuda")
        yield path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = (
        *("--max-model-len", "512", "--max-num-seqs", "16", "--tokenizer", str(EARLY), "--enforce-eager"),
        *("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(1 << 30)),
        *("--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs"),
        *("--served-model-name", MODEL, str(model)),  # `AsyncGRPOTrainer` asks for the model by its path
    )
    log = tmp_path_factory.mktemp("trl") / "server.log"
    settings = {"upload_idle_seconds": IDLE_SECONDS}
    variables = {"CUDA_VISIBLE_DEVICES": visible_gpus()[0], "NCCL_HOSTID": "the-server"}
    with Server(model, log, arguments=arguments, settings=settings, variables=variables) as started:
        started.wait(900)
        yield started
        print(started.tail(60))


@pytest.fixture(
    params=[
        pytest.param(0, id="one GPU"),
        pytest.param(1, marks=pytest.mark.multigpu, id="two GPUs"),
    ]
)
def runs(request: pytest.FixtureRequest, server: Server, model: Path) -> Runs:
    """Trainers on the server's GPU, where NCCL must take them for a process of another machine, or on the next one."""
    place: int = request.param
    host = "the-server" if place else "the-trainer"
    return Runs(server, model, SECONDS, {"CUDA_VISIBLE_DEVICES": visible_gpus()[place], "NCCL_HOSTID": host})


@pytest.mark.parametrize(("trainer", "way"), WAYS)
def test_three_steps(runs: Runs, tmp_path: Path, trainer: str, way: str) -> None:
    runs.three_steps(tmp_path, trainer, way)


@pytest.mark.parametrize("trainer", ["grpo", "async"])
def test_a_trainer_that_is_killed_in_a_broadcast(runs: Runs, tmp_path: Path, trainer: str) -> None:
    runs.killed_and_started_again(tmp_path, trainer, IDLE_SECONDS)
