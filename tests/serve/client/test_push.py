# SPDX-License-Identifier: Apache-2.0
"""Pushing: from what, in which calls, and what is left behind when it fails."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.schema import Canary

from .conftest import Caller
from .pushes import (
    names,
)
from .server import Server


def test_a_push_may_leave_the_commit_to_its_caller(caller: Caller, server: Server, checkpoint: Path) -> None:
    ready = caller(server.url, "push", checkpoint, commit=False)
    assert (ready.state, server.epoch) == ("prepared", 0)
    assert names(server.calls, ready.id)[-1] == "POST /updates/u/prepare"
    assert (caller(server.url, "commit", ready.id).state, server.epoch) == ("committed", 1)


@pytest.mark.parametrize("checksum", [True, False])
def test_a_checkpoint_is_sent_and_committed(
    caller: Caller, server: Server, checkpoint: Path, checksum: bool
) -> None:
    seen: list[tuple[int, int | None]] = []
    done = caller(
        server.url,
        "push",
        checkpoint,
        version="step-1",
        base_epoch=0,
        instance="0a1b",
        running="wait",
        wait_seconds=2.0,
        canary=Canary(prompts=[[1, 2]]),
        chunk_bytes=84,
        chunks_in_flight=1,
        checksum=checksum,
        progress=lambda *progress: seen.append(progress),
    )
    assert (done.state, done.version, server.epoch) == ("committed", "step-1", 1)
    assert names(server.calls, done.id) == [
        "POST /updates",
        "PUT /updates/u/chunks/0",
        "PUT /updates/u/chunks/1",
        "POST /updates/u/commit",
    ]
    assert json.loads(server.bodies[0]) == {
        "id": done.id,
        "version": "step-1",
        "base_epoch": 0,
        "instance": "0a1b",
        "running": "wait",
        "wait_seconds": 2.0,
        "canary": {"prompts": [[1, 2]]},
        "partial": False,
        "sparse": False,
        "becomes_current": True,
    }
    sent = server.bodies[1:3]
    assert [sorted(load(body)) for body in sent] == [["w0", "w1"], ["w2"]]
    assert {name: tensor.tolist() for name, tensor in server.served.items()} == {
        f"w{index}": [float(index)] * (10 + index) for index in range(3)
    }
    for headers, body in zip(server.headers[1:3], sent, strict=True):
        assert headers["content-length"] == str(len(body))
        assert ("content-digest" in headers) == checksum
    total = sum(map(len, sent))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize(
    ("room", "in_flight", "expected"),
    [
        (2 * 84, 1, [["w0", "w1"], ["w2"]]),
        (2 * 84 - 1, 1, [["w0"], ["w1"], ["w2"]]),
        (4 * 84, 3, [["w0", "w1"], ["w2"]]),
        (4 * 84 - 1, 3, [["w0"], ["w1"], ["w2"]]),
    ],
)
def test_chunks_under_way_and_one_more_fit_into_the_servers_room(
    caller: Caller, server: Server, checkpoint: Path, room: int, in_flight: int, expected: list[list[str]]
) -> None:
    server.room = room
    caller(server.url, "push", checkpoint, chunks_in_flight=in_flight)
    assert sorted(sorted(load(body)) for body in server.bodies[1:-1]) == expected


def test_a_checkpoint_that_is_not_there_opens_no_update(
    caller: Caller, server: Server, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="found none"):
        caller(server.url, "push", tmp_path / "missing")
    assert server.calls == []


def test_a_truncated_checkpoint_opens_no_update(caller: Caller, server: Server, checkpoint: Path) -> None:
    file = checkpoint / "2.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(
        ValueError, match=rf"2\.safetensors: .*expected {len(content)} bytes.* found {len(content) - 1}"
    ):
        caller(server.url, "push", str(checkpoint))
    assert server.calls == []


def test_a_checkpoint_that_shrinks_while_it_is_sent_is_abandoned(
    caller: Caller, server: Server, checkpoint: Path
) -> None:
    def shrink(sent: int, total: int | None) -> None:
        (checkpoint / "2.safetensors").write_bytes(b"")

    with pytest.raises(UpdateError, match=r"2\.safetensors was changed while it was read") as refused:
        caller(server.url, "push", checkpoint, chunk_bytes=84, chunks_in_flight=1, progress=shrink)
    assert refused.value.kind == "file-changed"
    assert server.states == ["abandoned"]
