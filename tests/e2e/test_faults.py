# SPDX-License-Identifier: Apache-2.0
"""Faults in real servers. With one rank every one that leaves its server alive; with two those where the ranks differ in what
they have done; and one for each of them that ends it.

`scripts/fault-matrix` runs them all.
"""

import json
from collections.abc import Iterator

import pytest

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.errors import UpdateError

from .conftest import answering
from .fault_cells import CELLS, DEAD, Cell, FaultyServer, run

ALIVE = [
    cell
    for cell in CELLS
    if cell.expected != DEAD
    and cell.kind != "hang"
    and (cell.ranks == 1 or (cell.kind == "exception" and cell.point in ("staging", "commit", "rollback")))
]
ENDED = [Cell("kill -9", "staging", 2), Cell("hang", "commit", 1)]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, FaultyServer]]:
    """A server of each size with the fault plugin, started when it is needed."""
    folder = tmp_path_factory.mktemp("faulty")
    started = {ranks: FaultyServer(folder, ranks) for ranks in (1, 2)}
    with answering(*started.values()):
        yield started


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bit_that_flips_is_found(faulty: dict[int, FaultyServer], ranks: int):
    """In weights that an update brought. They stay wrong when a rollback brings them back."""
    server = faulty[ranks]
    with server.client() as client:
        assert client.verify().ranks == ranks
        epoch = client.push(LATE, version="late").result["epoch"]
        assert client.verify().epoch == epoch
        fault = {"point": "verify", "kind": "flipped bit", "rank": ranks - 1, "lasting": False}
        server.fault.write_text(json.dumps(fault))
        for _ in range(2):
            with pytest.raises(UpdateError) as caught:
                client.verify()
            assert (caught.value.kind, caught.value.details["ranks"]) == ("weights-differ", [ranks - 1])
        client.push(EARLY, version="early")
        assert client.verify().version == "early"
        client.rollback()
        with pytest.raises(UpdateError, match="not those that were committed as epoch"):
            client.verify()
        client.push(EARLY, version="early")
        client.verify()


@pytest.mark.parametrize("cell", ALIVE, ids=str)
def test_survived(faulty: dict[int, FaultyServer], cell: Cell):
    run(faulty[cell.ranks], cell)


@pytest.mark.parametrize("cell", ENDED, ids=str)
def test_ended(faulty: dict[int, FaultyServer], cell: Cell):
    run(faulty[cell.ranks], cell)
