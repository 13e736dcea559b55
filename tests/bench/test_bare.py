# SPDX-License-Identifier: Apache-2.0
"""Baselines move the bytes of an update, all of them, and leave nothing behind."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_fp8ext.bench import bare
from vllm_fp8ext.bench.bare import baseline
from vllm_fp8ext.serve.client import CHUNKS_IN_FLIGHT
from vllm_fp8ext.serve.safetensors_body import bodies
from vllm_fp8ext.serve.safetensors_file import ranges_of
from vllm_fp8ext.update.transports import read_ahead
from vllm_fp8ext.update.transports.read_ahead import READERS


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two files of some megabytes."""
    for index in range(2):
        tensors = {f"w{index}.{n}": torch.ones(300_000 + n) for n in range(3)}
        save_file(tensors, tmp_path / f"{index}.safetensors")
    return tmp_path


def test_an_upload_has_the_bytes_of_a_push(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "CHUNK_BYTES", 2_500_000)
    chunks = list(bodies(ranges_of(checkpoint), 2_500_000))
    assert len(chunks) == 3
    with baseline("http") as result:
        assert result is not None
        for _ in range(2):
            result(checkpoint)
    case = result.case("tiny", "http")
    assert [sample["bytes"] for sample in case["samples"]] == [sum(body.length for body in chunks)] * 2
    assert (case["model"], case["transport"], case["variant"]) == ("tiny", "http", "bare")
    medians = case["seconds_by_threads"]
    assert medians.keys() == {1, CHUNKS_IN_FLIGHT}
    assert medians[case["threads"]] == case["total_seconds"] == min(medians.values())
    seconds = [sample["seconds"] for sample in case["samples"]]
    assert (case["first_seconds"], case["total_seconds"]) == (seconds[0], pytest.approx(sum(seconds) / 2))
    assert multiprocessing.active_children() == []


def test_a_failure_ends_the_server_too(tmp_path: Path) -> None:
    def upload() -> None:
        with baseline("http") as bare:
            assert bare is not None
            bare(tmp_path)

    with pytest.raises(ValueError, match="found none"):
        upload()
    assert multiprocessing.active_children() == []


def test_files_are_read_whole(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "READ_BYTES", 1 << 20)
    with baseline("files") as bare:
        assert bare is not None
        bare(checkpoint)
    case = bare.case("tiny", "files")
    assert case["bytes"] == sum(file.stat().st_size for file in checkpoint.iterdir())
    assert case["threads"] == READERS


@pytest.mark.parametrize("transport", ["ipc", "http-fp8", "reload"])
def test_other_transports_have_none(transport: str) -> None:
    with baseline(transport) as bare:
        assert bare is None
