# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers by vLLM's weight transfer, on a CPU: Gloo in place of NCCL. `tests/gpu/test_trl_nccl.py` has NCCL."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from trl_runs import TRAINERS, WAYS, Runs

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.demo.server import MODEL, Server

from .conftest import OPTIONS, PATIENCE_SECONDS
from .native_trainer import TRANSFER
from .plugins import variables

SECONDS = 600
pytestmark = [
    pytest.mark.full,
    pytest.mark.alone,
    pytest.mark.timeout(2 * SECONDS + 300),
    pytest.mark.skipif(not TRAINERS.is_dir(), reason="needs TRL: scripts/setup_env.py --beside"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    logs = tmp_path_factory.mktemp("trl")
    named = ("--served-model-name", MODEL, str(EARLY))  # `AsyncGRPOTrainer` asks for the model by its path
    settings = {"upload_idle_seconds": PATIENCE_SECONDS}
    arguments = (*OPTIONS, *TRANSFER, *named, "--logprobs-mode", "processed_logprobs")
    with Server(
        EARLY, logs / "server.log", arguments=arguments, settings=settings, variables=variables(logs)
    ) as server:
        server.wait()
        yield Runs(server, EARLY, SECONDS, {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(("trainer", "way"), WAYS)
def test_three_steps(runs: Runs, tmp_path: Path, trainer: str, way: str) -> None:
    runs.three_steps(tmp_path, trainer, way)


@pytest.mark.parametrize("trainer", ["grpo", "async"])
def test_a_trainer_that_is_killed_in_an_update(runs: Runs, tmp_path: Path, trainer: str) -> None:
    runs.killed_and_started_again(tmp_path, trainer, PATIENCE_SECONDS)
