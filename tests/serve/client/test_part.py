# SPDX-License-Identifier: Apache-2.0
"""Parts of an update that several processes send, and what each of them has to send."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import local_slices, slice_name

from .conftest import Caller
from .server import Server, answer, chunk


def test_parts_have_chunks_of_their_own(caller: Caller, server: Server) -> None:
    caller(server.url, "open", id="u")
    for part in (2, 0):
        mine = {f"w{part}.{n}": torch.full((10,), float(n)) for n in range(3)}
        update = caller(server.url, "send", "u", mine, part=part, parts=3, chunk_bytes=40)
    assert sorted(map(int, update.chunks)) == [0, 2, 3, 5, 6, 8]
    assert update.state == "open"
    assert server.served == {}
    caller(server.url, "commit", "u")
    assert sorted(server.served) == [f"w{part}.{n}" for part in (0, 2) for n in range(3)]


def test_what_fails_stays_open(caller: Caller, server: Server) -> None:
    caller(server.url, "open", id="u")
    server.faults[chunk(1)] = [answer(422, kind="wrong-slice")]
    with pytest.raises(UpdateError, match="wrong-slice"):
        caller(server.url, "send", "u", {"w[0:1]": torch.ones(1)}, part=1, parts=2)
    assert server.states == ["open"]


def test_no_update_is_opened(caller: Caller, server: Server) -> None:
    with pytest.raises(UpdateError) as caught:
        caller(server.url, "send", "u", {"w": torch.ones(1)})
    assert (caught.value.kind, server.states) == ("unknown-update", [])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"part": 2, "parts": 2}, "expected a part from 0 to 1, found 2"),
        ({"part": -1}, "expected a part from 0 to 0"),
        ({"transport": "nccl"}, "expected chunk_bytes, .*, found transport"),
        ({"chunk_bytes": 0}, "chunk_bytes: expected at least 1"),
    ],
)
def test_what_is_no_part_is_refused(
    caller: Caller, server: Server, options: dict[str, Any], match: str
) -> None:
    caller(server.url, "open", id="u")
    with pytest.raises(ValueError, match=match):
        caller(server.url, "send", "u", {"w": torch.ones(1)}, **options)


@pytest.fixture
def third() -> Iterator[None]:
    """This process is the third of four, of which none of the others is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    dist.destroy_process_group()


WHOLE = torch.arange(10 * 6).view(10, 6)


def sent(tensor: Any, **options: bool) -> dict[str, torch.Tensor]:
    return dict(local_slices({"w": tensor}, **options))


@pytest.mark.parametrize(
    ("mesh", "placements", "box"),
    [
        ((4,), [Shard(0)], ((6, 9), (0, 6))),
        ((4,), [Shard(1)], ((0, 10), (4, 6))),
        ((2, 2), [Shard(0), Shard(1)], ((5, 10), (0, 3))),
        ((2, 2), [Shard(1), Replicate()], ((0, 10), (3, 6))),
        ((2, 2), [Replicate(), Shard(0)], None),
        ((4,), [Replicate()], None),
        ((1, 4), [Shard(0), Shard(1)], ((0, 10), (4, 6))),
    ],
    ids=str,
)
def test_a_process_sends_its_shard(third: None, mesh: tuple[int, ...], placements: Any, box: Any) -> None:
    """Ten rows in four shards are 3, 3, 3 and 1; six columns 2, 2, 2 and none. Of replicas the first process sends."""
    local = WHOLE if box is None else WHOLE[tuple(slice(*side) for side in box)].contiguous()
    if box is None and placements[-1] == Shard(0):
        local = WHOLE[:5].contiguous()
    tensor = DTensor.from_local(
        local, init_device_mesh("cpu", mesh), placements, shape=WHOLE.shape, stride=WHOLE.stride()
    )
    result = sent(tensor)
    assert list(result) == ([] if box is None else [slice_name("w", box)])
    if box is not None:
        assert torch.equal(result[slice_name("w", box)], local)


def test_what_all_hold_is_sent_by_the_first(third: None) -> None:
    assert list(sent(WHOLE)) == ["w"]
    assert sent(WHOLE, first=False) == {}


def test_a_sum_that_is_not_added_up_is_refused(third: None) -> None:
    tensor = DTensor.from_local(WHOLE, init_device_mesh("cpu", (4,)), [Partial()])
    with pytest.raises(ValueError, match="tensor w: expected shards or replicas, found P"):
        sent(tensor)
