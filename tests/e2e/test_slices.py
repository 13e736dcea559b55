# SPDX-License-Identifier: Apache-2.0
"""Updates of slices, to a server with two ranks: as trainers send them whose processes hold a part of the weights each."""

import httpx
import pytest
from safetensors.torch import load_file
from torch import Tensor

from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import Client, changed_slices, slice_name
from vllm_fp8ext.update.contract.tensor_slices import Box, extents, parsed_slice

from .ask import complete, state

DOWN, GATE = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.gate_proj.weight"
"""`[256, 640]`, of which each rank serves half of the columns, and `[640, 256]`, of which each serves half of the rows."""
OUTPUT = "model.layers.0.self_attn.o_proj.weight"
"""`[256, 256]`, quantized, of which each rank serves half of the columns."""


@pytest.fixture(scope="module")
def late() -> dict[str, Tensor]:
    return load_file(LATE / "model.safetensors")


def sliced(weights: dict[str, Tensor], name: str) -> Tensor:
    """The tensor, or the slice of one, that has this name."""
    part = parsed_slice(name)
    return (
        weights[part.tensor][tuple(slice(*side) for side in part.box)].contiguous() if part else weights[name]
    )


def slices_of(client: Client, rank: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank serves the slices whose names the server tells."""
    shown = client.manifest(rank=rank)
    assert shown["rank"] == rank
    names = [name for entry in shown["tensors"].values() for name in entry["slices"]]
    return {name: sliced(weights, name) for name in names}


def test_two_processes_send_what_each_rank_serves(pair: Server, late: dict[str, Tensor]) -> None:
    with pair.client() as client:
        first, second = (slices_of(client, rank, late) for rank in range(2))
        assert {f"{DOWN}[0:256,0:320]", f"{GATE}[0:320,0:256]"} <= first.keys()
        assert {f"{DOWN}[0:256,320:640]", f"{GATE}[320:640,0:256]"} <= second.keys()
        own = {name: part for name, part in second.items() if name not in first}
        update = client.open(version="sliced")
        client.send(update.id, own, part=1, parts=2, chunk_bytes=1 << 16)
        assert client.update(update.id).tensors_missing == len(late)
        sent = client.send(update.id, first, part=0, parts=2, chunk_bytes=1 << 16)
        assert (sent.tensors_missing, sent.problem_count) == (0, 0)
        assert {int(n) % 2 for n in sent.chunks} == {0, 1}
        client.commit(update.id)
        of_slices = client.digests()
        assert of_slices.version == "sliced"
        assert client.verify().version == "sliced"
        client.push(late, version="whole")
        assert client.digests().digests == of_slices.digests
    assert complete(pair, "1+2=", 4)["choices"][0]["weight_versions"][0]["version"] == "whole"


def test_rows_that_no_rank_has_by_itself_and_codes_are_taken(pair: Server, late: dict[str, Tensor]) -> None:
    """As a trainer has them that is sharded by rows alone (FSDP2), over three processes."""
    thirds = {}
    for name, weight in late.items():
        if weight.dim() < 2 or "embed" in name:
            thirds[name] = weight
            continue
        for rows in weight.tensor_split(3):
            start = rows.storage_offset() // weight.shape[1]
            thirds[slice_name(name, ((start, start + len(rows)), (0, weight.shape[1])))] = rows
    with pair.client() as client:
        client.push(thirds, version="thirds")
        of_slices = client.digests().digests
        client.push(late, version="whole")
        assert client.digests().digests == of_slices
        first, second = (slices_of(client, rank, late) for rank in range(2))
        client.push(first | second, version="codes", fp8=True)
        assert client.digests().digests == of_slices


@pytest.mark.parametrize(
    ("tensor", "box", "expected", "sides"),
    [
        (
            OUTPUT,
            ((0, 256), (0, 100)),
            "all of [0, 128] in dimension 1, which rank 0 serves, or whole blocks of it",
            [0, 100],
        ),
        (DOWN, ((0, 256), (0, 641)), "a box within [[0, 256], [0, 640]]", [[0, 256], [0, 641]]),
    ],
)
def test_a_bad_slice_is_refused_by_name(
    pair: Server, late: dict[str, Tensor], tensor: str, box: Box, expected: str, sides: list[int]
) -> None:
    before = state(pair)
    name = slice_name(tensor, box)
    weights = {other: weight for other, weight in late.items() if other != tensor}
    with pair.client() as client, pytest.raises(UpdateError) as caught:
        client.push({**weights, name: late[tensor].new_zeros(extents(box))})
    assert caught.value.kind == "wrong-slice"
    [problem] = caught.value.details["problems"]
    assert (problem["tensor"], problem["expected"], problem["found"]) == (name, expected, sides)
    assert state(pair) == before


def test_what_lacks_a_slice_is_not_committed(pair: Server, late: dict[str, Tensor]) -> None:
    weights = {name: weight for name, weight in late.items() if name != DOWN}
    with pair.client() as client, pytest.raises(UpdateError) as caught:
        client.push({**weights, f"{DOWN}[0:256,0:320]": late[DOWN][:, :320]})
    assert (caught.value.kind, caught.value.details["missing"]) == ("incomplete", [f"{DOWN}[0:256,320:640]"])


def test_there_is_no_other_rank(pair: Server) -> None:
    with pair.client() as client, pytest.raises(UpdateError, match="expected 0 to 1") as caught:
        client.manifest(rank=2)
    assert (caught.value.kind, caught.value.status) == ("unknown-rank", 404)
    headers = {"Authorization": f"Bearer {pair.key}"}
    wrong = httpx.get(f"{pair.url}/fp8ext/v1/weights/manifest?rank=x", headers=headers, timeout=60)
    assert (wrong.status_code, wrong.json()["type"].rpartition(":")[2]) == (422, "invalid-request")


def test_a_sparse_update_changes_what_it_brings(pair: Server, late: dict[str, Tensor]) -> None:
    """Some rows of one layer: what is served then is what all of the weights would be, bit for bit."""
    new = {name: weight.clone() for name, weight in late.items()}
    new[DOWN][3, 400] += 1.0
    new[GATE][639, 0] += 1.0
    new["model.layers.1.self_attn.k_proj.weight"][1, 1] += 1.0
    new["model.norm.weight"][0] += 1.0
    with pair.client() as client:
        client.push(late, version="base")
        before = client.digests()
        slices = changed_slices(client.manifest(), late, new)
        assert (
            0
            < sum(part.nbytes for part in slices.values())
            < 0.2 * sum(part.nbytes for part in late.values())
        )
        with pytest.raises(UpdateError) as caught:
            client.push(slices, sparse=True, base_epoch=before.epoch - 1)
        assert caught.value.kind == "stale-base"
        assert client.digests() == before
        update = client.push(slices, version="sparse", sparse=True, base_epoch=before.epoch)
        assert (update.sparse, update.partial) == (True, True)
        of_slices = client.digests().digests
        assert client.verify().version == "sparse"
        assert client.rollback().version == "base"
        assert client.digests().digests == before.digests
        client.push(new, version="whole")
        assert client.digests().digests == of_slices != before.digests


def test_a_sparse_update_needs_a_base(pair: Server) -> None:
    with (
        pair.client() as client,
        pytest.raises(UpdateError, match="a sparse update needs base_epoch") as caught,
    ):
        client.open(sparse=True)
    assert caught.value.kind == "invalid-request"
