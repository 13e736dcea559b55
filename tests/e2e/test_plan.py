# SPDX-License-Identifier: Apache-2.0
"""`fp8ext plan` against running servers: the blocks and contexts that they have room for, and what their shadows take."""

import json

import pytest
from click.testing import CliRunner

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.cli import cli
from vllm_fp8ext.demo.server import Server

from .ask import cache_config


@pytest.mark.parametrize(("name", "ranks"), [("tp1", 1), ("tp2", 2)])
def test_blocks_and_shadow(servers: dict[str, Server], name: str, ranks: int):
    cache = cache_config(servers[name])
    given = ["--tp", str(ranks), "--block-size", cache["block_size"]]
    given += ["--kv-cache-memory-bytes", cache["kv_cache_memory_bytes"]]
    done = CliRunner().invoke(cli, ["plan", str(EARLY), *given, "--json"], catch_exceptions=False)
    planned = json.loads(done.stdout)["rows"]
    counts = {(row["blocks"], row["tokens"], row["batch"]) for row in planned if row["kv"] == "bf16"}
    concurrency = int(float(cache["kv_cache_max_concurrency"]))
    assert counts == {(int(cache["num_gpu_blocks"]), int(cache["kv_cache_size_tokens"]), concurrency)}
    with servers[name].client() as client:
        weights = client.weights()
    [shadow] = {row["twin_bytes"] for row in planned if row["twin_bytes"]}
    assert weights.twin_bytes == pytest.approx([shadow] * ranks, rel=1e-4), (
        "scales of ragged shards are rounded up"
    )


def test_what_gemms_do_not_take_on_two_ranks_stays_in_16_bits(pair: Server, single: Server):
    """A rank of two has 320 columns of `down_proj`, where FP8 kernels for many tokens take multiples of 128."""
    for server, quantized in ((single, True), (pair, False)):
        with server.client() as client:
            tensors = client.manifest()["tensors"]
        pieces = [
            piece
            for name in tensors
            for piece in tensors[name]["pieces"]
            if name.endswith("down_proj.weight")
        ]
        assert {piece["quantized"] for piece in pieces} == {quantized}
    lines = [line for line in pair.log.read_text().splitlines() if "in 16 bits" in line]
    assert len(lines) == 1
    assert "blockfp8 keeps 3 layers in 16 bits, of 256x320" in lines[0]
    assert '{"fp8ext": {"quantize": ["model.layers.*.mlp.down_proj"]}}' in lines[0]
