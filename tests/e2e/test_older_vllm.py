# SPDX-License-Identifier: Apache-2.0
"""Servers of an older vLLM, which lacks features and nothing of an update. `scripts/check-vllm 0.31.0` downloads it."""

from collections.abc import Iterator

import httpx
import pytest
import torch
from program_modules import module_of
from safetensors.torch import load_file

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import SMALL, Server
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .ask import complete, outputs, state
from .conftest import DEV, answering
from .lacking import remove
from .native_trainer import TRANSFER, Trainer
from .test_features import OtherVllm, off, paths

VERSION = "0.31.0"
LACKING = {
    "beam_versions",
    "dialect_versions",
    "flat_answers",
    "output_interval",
    "shared_segments",
    "weight_versions",
}
"""Features that it cannot have, apart from those that are for GPUs."""
pytestmark = [pytest.mark.full, pytest.mark.alone]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One on the early checkpoint, which takes vLLM's weight transfer, and one that begins with the late one."""
    check = module_of("scripts/check-vllm")
    wheel = check.downloaded(VERSION)
    if wheel is None:
        pytest.skip(f"needs scripts/check-vllm {VERSION}")
    if (built := check.torch_of(wheel)) != torch.__version__.partition("+")[0]:
        pytest.skip(f"vLLM {VERSION} is built for torch {built}")
    folder = tmp_path_factory.mktemp("older")
    check.unpack(wheel, VERSION, folder)
    variables = {**paths(folder), **DEV}
    started = {
        "early": OtherVllm(EARLY, folder / "early.log", arguments=(*SMALL, *TRANSFER), variables=variables),
        "late": OtherVllm(LATE, folder / "late.log", arguments=SMALL, variables=variables),
    }
    with answering(*started.values()):
        yield started
    remove(folder)


def test_it_says_what_it_lacks(older: dict[str, Server]) -> None:
    server = older["early"]
    assert httpx.get(f"{server.url}/version").json()["version"].startswith(VERSION)
    told = {name: reason for name, reason in off(server).items() if reason != "no CUDA GPU"}
    assert set(told) >= LACKING
    for name in LACKING:
        assert "vLLM lacks" in str(told[name]) or "it needs" in str(told[name])
    assert server.log.read_text().count("the feature weight_versions is off") == 1
    assert "weight_versions" not in complete(server, "12+34=", 4)["choices"][0]


def test_an_update_equals_a_start_and_is_taken_back(older: dict[str, Server]) -> None:
    server = older["early"]
    cold, wanted = state(server), state(older["late"])
    with server.client() as client:
        assert client.push(LATE, version="late").result["epoch"] == 1
        pushed = state(server)
        assert pushed["outputs"] == wanted["outputs"] != cold["outputs"]
        assert pushed["digests"]["digests"] == wanted["digests"]["digests"]
        assert client.verify().version == "late"
        client.rollback()
    assert outputs(server) == cold["outputs"]


def test_vllms_weight_transfer_updates_it_with_a_key_alone(older: dict[str, Server]) -> None:
    server = older["early"]
    assert httpx.post(f"{server.url}/start_weight_update", json={}).status_code == 401
    with Trainer(server) as trainer:
        trainer.init()
        finished = trainer.push(load_file(LATE / "model.safetensors"), version="transferred")
        assert finished["kept_count"] == 0
        assert trainer.http.get("/weight_info").json() == {"weight_version": "transferred"}
    with server.client() as client:
        manifest = Manifest.from_dict(client.manifest())
        assert client.digests().digests == checkpoint_digests(LATE, manifest)
