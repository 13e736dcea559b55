# SPDX-License-Identifier: Apache-2.0
"""Whole updates by NCCL: a server of one rank and of two, and a trainer on another GPU."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from vllm_fp8ext.bench.layouts import visible_gpus
from vllm_fp8ext.demo.server import MODEL, Server

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]

PROMPT = [3 + 7 * i % 500 for i in range(40)]
ARGUMENTS = (
    *("--max-model-len", "512", "--max-num-seqs", "4", "--skip-tokenizer-init", "--enforce-eager"),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(256 << 20)),
)
TOGETHER = (
    *("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"),
    "--disable-custom-all-reduce",
)


@pytest.fixture(scope="module")
def checkpoints() -> Iterator[tuple[Path, Path]]:
    """Two of one shape."""
    from vllm_fp8ext.bench.generated import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        both = Path(folder) / "early", Path(folder) / "late"
        for seed, path in enumerate(both):
            write_checkpoint(path, "Qwen3-0.6B", seed, "cuda")
        yield both


def trained(server: Server, ranks: int, *pushes: Any) -> subprocess.CompletedProcess[str]:
    """What a trainer on the last GPU does. A rank of the server may have that one too (where there are two GPUs, for two
    ranks): NCCL takes them for processes of two machines then, else it would refuse."""
    gpus = torch.cuda.device_count()
    variables = dict(os.environ) | ({"NCCL_HOSTID": "the-trainer"} if gpus <= ranks else {})
    scenario = Path(__file__).with_name("broadcast_scenario.py")
    line = [
        sys.executable,
        "-P",
        str(scenario),
        server.url,
        server.key,
        f"cuda:{gpus - 1}",
        *map(str, pushes),
    ]
    return subprocess.run(line, env=variables, capture_output=True, text=True, timeout=200)


def told(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def answer(server: Server) -> list[int]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    choice: list[int] = reply["choices"][0]["token_ids"]
    return choice


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_serves_what_a_trainer_broadcasts(
    checkpoints: tuple[Path, Path], ranks: int, tmp_path: Path
) -> None:
    """The same bytes as from files, by every way, after a trainer that died, too."""
    early, late = checkpoints
    arguments = (*ARGUMENTS, *(TOGETHER if ranks == 2 else ()))
    settings = {"allowed_dirs": [str(early.parent)], "upload_idle_seconds": 10.0}
    variables = {
        "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[:ranks]),
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }
    log = tmp_path / "server.log"
    with (
        Server(early, log, arguments=arguments, settings=settings, variables=variables) as server,
        server.client() as client,
    ):
        server.wait(400)
        cold, first = client.digests().digests, answer(server)
        client.load(late)
        changed, second = client.digests().digests, answer(server)
        assert (changed == cold, second == first) == (False, False)
        client.rollback()

        dead = trained(server, ranks, "dies", late)
        assert dead.returncode == 9, dead.stdout[-2000:] + dead.stderr[-4000:]
        assert (client.digests().digests, answer(server)) == (cold, first)
        left = client.weights().update
        if left is not None:
            client.abandon(left)

        pushes = told(
            trained(server, ranks, "whole", late, "lent", early, "parts", late, "fp8", early, "lent", late)
        )
        assert [push["digests"] for push in pushes] == [changed, cold, changed, cold, changed]
        whole, _, parts, coded, _ = (push["chunks"] for push in pushes)
        assert whole < min(coded, parts)
        assert pushes[3]["bytes"] < 0.8 * pushes[0]["bytes"]
        assert answer(server) == second
        assert client.verify().version == "late"
        print(json.dumps([push["seconds"] for push in pushes]))
