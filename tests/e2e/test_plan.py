# SPDX-License-Identifier: Apache-2.0
"""`fp8ext plan` against running servers: the blocks and contexts that they have room for, and what their twins take."""

import json

import pytest
from click.testing import CliRunner

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.cli import cli
from vllm_fp8ext.demo.server import Server

from .ask import cache_config


@pytest.mark.parametrize(("name", "ranks"), [("tp1", 1), ("tp2", 2)])
def test_blocks_and_twin(servers: dict[str, Server], name: str, ranks: int):
    found = cache_config(servers[name])
    given = ["--tp", str(ranks), "--block-size", found["block_size"]]
    given += ["--kv-cache-memory-bytes", found["kv_cache_memory_bytes"]]
    done = CliRunner().invoke(cli, ["plan", str(EARLY), *given, "--json"], catch_exceptions=False)
    planned = json.loads(done.stdout)["rows"]
    counts = {(row["blocks"], row["tokens"], row["batch"]) for row in planned if row["kv"] == "bf16"}
    concurrency = int(float(found["kv_cache_max_concurrency"]))
    assert counts == {(int(found["num_gpu_blocks"]), int(found["kv_cache_size_tokens"]), concurrency)}
    with servers[name].client() as client:
        weights = client.weights()
    [twin] = {row["twin_bytes"] for row in planned if row["twin_bytes"]}
    assert weights.twin_bytes == pytest.approx([twin] * ranks, rel=1e-4), (
        "scales of ragged shards are rounded up"
    )
