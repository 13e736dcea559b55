# SPDX-License-Identifier: Apache-2.0
"""Updates that are gone on with: what is committed is what was pushed last, and nothing besides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client.source import Pushable

from .conftest import Caller
from .server import Server, answer, chunk, drop, drop_answer

COUNT = 6


def weights(value: float, count: int = COUNT) -> dict[str, Tensor]:
    """Of 40 bytes each; the first two are the same in all."""
    return {f"a{n}": torch.full((10,), float(n) if n < 2 else value) for n in range(count)}


Make = Callable[[Path, dict[str, Tensor]], Pushable]


def as_file(folder: Path, tensors: dict[str, Tensor]) -> Pushable:
    save_file(tensors, folder / "six.safetensors")
    return folder / "six.safetensors"


def as_dict(folder: Path, tensors: dict[str, Tensor]) -> Pushable:
    return tensors


def as_iterable(folder: Path, tensors: dict[str, Tensor]) -> Pushable:
    return iter(tensors.items())


@pytest.fixture(params=[as_file, as_dict, as_iterable])
def make(request: pytest.FixtureRequest) -> Make:
    result: Make = request.param
    return result


def puts(server: Server) -> list[str]:
    return sorted({call.rpartition("/")[2] for call in server.calls if call.startswith("PUT")})


def interrupted(
    caller: Caller, server: Server, pushed: Pushable, call: str = chunk(4), fault: Any = None, **options: Any
) -> str:
    """The id of an update that was interrupted."""
    server.faults[call] = [fault or drop()]
    with pytest.raises(UpdateError) as caught:
        caller(server.url, "push", pushed, chunk_bytes=40, chunks_in_flight=1, retries=0, **options)
    assert caught.value.kind == "interrupted"
    server.calls.clear()
    return str(caught.value.details["id"])


def test_chunks_that_differ_are_sent_again(
    caller: Caller, server: Server, make: Make, tmp_path: Path
) -> None:
    id = interrupted(caller, server, make(tmp_path, weights(8.0)))
    done = caller(server.url, "push", make(tmp_path, weights(9.0)), chunk_bytes=40, id=id)
    assert done.state == "committed"
    assert {name: tensor.tolist() for name, tensor in server.served.items()} == {
        name: tensor.tolist() for name, tensor in weights(9.0).items()
    }
    assert puts(server) == ["2", "3", "4", "5"]


def test_chunks_that_are_the_same_are_not(caller: Caller, server: Server, make: Make, tmp_path: Path) -> None:
    id = interrupted(caller, server, make(tmp_path, weights(8.0)))
    caller(server.url, "push", make(tmp_path, weights(8.0)), chunk_bytes=40, id=id, checksum=False)
    assert puts(server) == ["4", "5"]
    assert len(server.served) == COUNT


def test_chunks_that_came_without_a_digest_are_sent_again(
    caller: Caller, server: Server, make: Make, tmp_path: Path
) -> None:
    id = interrupted(caller, server, make(tmp_path, weights(8.0)), checksum=False)
    caller(server.url, "push", make(tmp_path, weights(9.0)), chunk_bytes=40, id=id)
    assert puts(server) == ["0", "1", "2", "3", "4", "5"]
    assert torch.equal(server.served["a3"], weights(9.0)["a3"])


def test_what_only_the_first_push_brought_is_not_committed(
    caller: Caller, server: Server, make: Make, tmp_path: Path
) -> None:
    """Nothing is missing then, and yet it would be a mixture."""
    server.required = {f"a{n}" for n in range(COUNT - 2)}
    id = interrupted(caller, server, make(tmp_path, weights(8.0)), "POST /updates/*/commit")
    with pytest.raises(UpdateError, match="has chunks of other weights") as refused:
        caller(server.url, "push", make(tmp_path, weights(9.0, 2)), chunk_bytes=40, id=id)
    assert (refused.value.kind, refused.value.details["found"]) == ("other-update", ["2", "3", "4", "5"])
    assert server.states == ["abandoned"]


@pytest.mark.parametrize("value", [8.0, 9.0])
def test_an_update_that_turns_out_to_be_committed(
    caller: Caller, server: Server, make: Make, tmp_path: Path, value: float
) -> None:
    """With the same weights it is what was asked for. Of an iterable nothing is asked."""
    id = interrupted(caller, server, make(tmp_path, weights(8.0)), "POST /updates/*/commit", drop_answer)
    again = make(tmp_path, weights(value))
    if value == 8.0 or make is as_iterable:
        assert caller(server.url, "push", again, chunk_bytes=40, id=id).state == "committed"
    else:
        with pytest.raises(UpdateError, match="is committed, with other weights than these") as refused:
            caller(server.url, "push", again, chunk_bytes=40, id=id)
        assert refused.value.kind == "other-update"
    assert puts(server) == []
    assert server.states == ["committed"]


def test_servers_that_follow_get_what_the_others_serve(
    caller: Caller, start: Callable[..., Server], make: Make, tmp_path: Path
) -> None:
    servers = [start(), start()]
    urls = [server.url for server in servers]
    servers[1].faults["POST /updates/*/commit"] = [answer(422, kind="canary-failed")] * 9
    options: dict[str, Any] = {"chunk_bytes": 40, "chunks_in_flight": 1, "retries": 0}
    with pytest.raises(UpdateError) as caught:
        caller(urls, "push", make(tmp_path, weights(8.0)), **options)
    assert caught.value.kind == "partly-committed"
    id = caught.value.details["id"]
    servers[1].faults.clear()
    with pytest.raises(UpdateError, match="with other weights than these"):
        caller(urls, "push", make(tmp_path, weights(9.0)), id=id, **options)
    assert [server.epoch for server in servers] == [1, 0]
    caller(urls, "push", make(tmp_path, weights(8.0)), id=id, **options)
    assert [server.epoch for server in servers] == [1, 1]
    assert torch.equal(servers[0].served["a4"], servers[1].served["a4"])
