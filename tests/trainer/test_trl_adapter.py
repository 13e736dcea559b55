# SPDX-License-Identifier: Apache-2.0
"""The correction in TRL's loss, beside TRL's own numbers where both define the same, and what it refuses."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_fp8ext.trainer.correction import ICEPOP, Correction
from vllm_fp8ext.trainer.mismatch import log_mismatch, measure
from vllm_fp8ext.trainer.trl_adapter import use_correction

PROJECT = Path(__file__).resolve().parents[2]
TRAINERS = Path(sys.prefix) / "trainers"
"""Where TRL lies, out of sight of vLLM."""
TRL_SECONDS = 600
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
needs_trl = pytest.mark.skipif(not TRAINERS.is_dir(), reason="needs TRL: scripts/setup_env.py --beside")


def environment() -> dict[str, str]:
    """Variables of a program that imports TRL."""
    path = os.pathsep.join(filter(None, [str(TRAINERS), str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    offline = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | offline


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `trl_scenario` wrote."""
    folder = tmp_path_factory.mktemp("trl")
    script = Path(__file__).with_name("trl_scenario.py")
    line = [sys.executable, "-P", str(script), str(folder / "facts.json"), str(folder)]
    done = subprocess.run(
        line, env=os.environ | environment(), capture_output=True, text=True, timeout=TRL_SECONDS
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads((folder / "facts.json").read_text())  # type: ignore[no-any-return]


def tensors(step: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs of trainer and server and the mask of a step; what the server did not score is masked."""
    server = torch.tensor(
        [[float("nan") if each is None else each for each in row] for row in step["server"]]
    )
    return torch.tensor(step["trainer"]), server, torch.tensor(step["mask"]) * ~server.isnan()


@needs_trl
@pytest.mark.parametrize("unscored", ["", "-unscored"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_loss_and_gradient_are_trls(facts: dict[str, Any], mode: str, unscored: str) -> None:
    own, adapter = facts[mode + unscored]["trl"], facts[mode + unscored]["adapter"]
    torch.testing.assert_close(torch.tensor(adapter["weights"]), torch.tensor(own["weights"]))
    assert adapter["loss"] == pytest.approx(own["loss"], rel=1e-5, abs=1e-7)
    assert adapter["gradient"] == pytest.approx(own["gradient"], rel=1e-4)
    assert own["gradient"] > 0


@needs_trl
def test_modes_differ(facts: dict[str, Any]) -> None:
    """Else the test above could compare numbers that no correction has touched."""
    gradients = {round(facts[mode]["trl"]["gradient"], 6) for mode in MODES}
    assert len(gradients) == len(MODES)
    assert len({each for row in facts["token_truncate"]["trl"]["weights"] for each in row}) > 6


@needs_trl
def test_icepop_comes_into_trls_loss(facts: dict[str, Any]) -> None:
    trainer, server, mask = tensors(facts["icepop"])
    weights = ICEPOP.weights(trainer, server, mask)
    torch.testing.assert_close(torch.tensor(facts["icepop"]["weights"]), torch.where(mask != 0, weights, 1.0))
    assert facts["icepop"]["loss"] != facts["token_mask-unscored"]["trl"]["loss"]


@needs_trl
def test_trl_logs_the_mismatch(facts: dict[str, Any]) -> None:
    step = facts["token_truncate-unscored"]["adapter"]
    trainer, server, mask = tensors(step)
    spans = [
        [
            {"version": "1", "epoch": 1, "start": 0, "end": 2},
            {"version": "2", "epoch": 2, "start": 2, "end": 6},
        ]
    ] * len(mask)
    expected = log_mismatch(trainer, server, mask, weight_versions=spans, correction=Correction(low=0.5))
    metrics = {name: value for name, value in step["metrics"].items() if name.startswith("mismatch/")}
    unscored = metrics.pop("mismatch/unscored_share")
    assert unscored == pytest.approx(1 / 21)
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert "mismatch/epochs_behind_1/kl_k3" in metrics


@needs_trl
def test_trl_and_we_measure_the_same_difference(facts: dict[str, Any]) -> None:
    step = facts["token_truncate"]["adapter"]
    mismatch = measure(*tensors(step), correction=Correction(low=0.5))
    assert step["metrics"]["sampling/sampling_logp_difference/mean"] == pytest.approx(
        mismatch.mean_difference, rel=1e-5
    )
    ratios = facts["token_truncate"]["trl"]["metrics"]
    assert ratios["sampling/importance_sampling_ratio/max"] == pytest.approx(min(2.0, mismatch.largest_ratio))


@needs_trl
def test_a_batch_without_a_token_that_counts_is_left_alone(facts: dict[str, Any]) -> None:
    """TRL masks truncated completions, at times all of a batch."""
    step = facts["all_masked"]
    assert step["loss"] == 0
    assert {each for row in step["weights"] for each in row} == {1.0}
    assert [name for name in step["metrics"] if name.startswith("mismatch/")] == ["mismatch/unscored_share"]


@needs_trl
def test_a_trainer_is_corrected_once(facts: dict[str, Any]) -> None:
    assert facts["twice"].startswith("trainer: expected one without a correction, found Correction(")


@pytest.mark.full
@needs_trl
def test_measures_are_gathered_from_all_processes(tmp_path: Path) -> None:
    """Means are weighted by tokens, and a process without a token that counts does not keep the others waiting."""
    sizes = {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    script = Path(__file__).with_name("gather_scenario.py")
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", str(script), str(tmp_path / f"{rank}.json")],
            env=os.environ | environment() | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        texts = [process.communicate(timeout=TRL_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], texts
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    first, *others = [rank["logged"] for rank in ranks]
    names = ("old_per_token_logps", "sampling_per_token_logps", "completion_mask")
    expected = measure(*(torch.cat([torch.tensor(rank[name]) for rank in ranks]) for name in names))
    for name in (
        "tokens",
        "kl_k1",
        "kl_k3",
        "mean_difference",
        "mean_ratio",
        "largest_ratio",
        "clipped_share",
    ):
        assert first[f"mismatch/{name}"] == pytest.approx(getattr(expected, name), rel=1e-5), name
        assert {other[f"mismatch/{name}"] for other in others} == {first[f"mismatch/{name}"]}
    assert 0 < first["mismatch/effective_sample_size"] < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_vllm": False}, "trainer: expected use_vllm=True in its GRPOConfig, found False"),
        (
            {"vllm_importance_sampling_correction": False},
            "expected vllm_importance_sampling_correction=True in its GRPOConfig, found False",
        ),
        ({"loss_type": "vespo"}, "level: expected 'token' with TRL's loss 'vespo', found 'sequence'"),
    ],
)
def test_trainers_that_can_not_be_corrected_are_refused(options: dict[str, Any], message: str) -> None:
    settings = {"use_vllm": True, "vllm_importance_sampling_correction": True, "loss_type": "dapo"} | options
    with pytest.raises(ValueError, match=message):
        use_correction(SimpleNamespace(**settings), Correction(level="sequence"))
