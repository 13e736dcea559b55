# SPDX-License-Identifier: Apache-2.0
"""Servers that come late: what a push makes of them, and how they catch up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import AsyncReplicas, Replicas, ServersFile

from .conftest import Caller
from .server import KEY, Server, answer

NEW = {"a": torch.full((3,), 7.0)}
OLD = {"a": torch.zeros(3)}


def add(*servers: Server) -> list[str]:
    return [server.url for server in servers]


@pytest.fixture
def servers(start: Callable[..., Server]) -> list[Server]:
    """Two that serve version 7, and a late one that has loaded something older."""
    servers = [start(), start(), start()]
    for server in servers[:2]:
        server.served, server.epoch, server.version = dict(NEW), 7, "7"
    servers[2].served, servers[2].state = dict(OLD), "not-current"
    return servers


def contents(server: Server) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in server.served.items()}


def test_a_late_server_gets_what_the_others_serve_before_it_answers(
    caller: Caller, servers: list[Server]
) -> None:
    late = servers[2]
    told = caller(add(*servers), "catch_up", NEW)
    assert list(told) == [late.url]
    assert (told[late.url].state, told[late.url].version) == ("serving", "7")
    assert contents(late) == contents(servers[0])
    assert late.calls[-2:] == ["GET /weights/digests", "POST /weights/current"]
    assert late.becomes_current == dict.fromkeys(late.updates, False)
    assert not any("updates" in call for server in servers[:2] for call in server.calls)
    assert caller(add(*servers), "catch_up", NEW) == {}


def test_what_has_loaded_the_same_is_told_so_alone(caller: Caller, servers: list[Server]) -> None:
    late = servers[2]
    late.served = dict(NEW)
    assert caller(add(*servers), "catch_up")[late.url].version == "7"
    assert late.state == "serving"
    assert late.updates == {}


@pytest.mark.parametrize("state", ["not-current", "no-weights"])
def test_other_weights_than_the_others_serve_are_not_answered_with(
    caller: Caller, servers: list[Server], state: str
) -> None:
    late = servers[2]
    late.state = state
    with pytest.raises(UpdateError) as caught:
        caller(add(*servers), "catch_up", {"a": torch.full((3,), 8.0)})
    assert caught.value.kind == "digests-differ"
    assert caught.value.details["failed"] == {
        late.url: "1 tensors differ from version 7 of the others, a first"
    }
    assert late.state == "not-current"
    assert "POST /weights/current" not in late.calls


def test_one_that_fits_is_told_though_another_does_not(
    caller: Caller, servers: list[Server], start: Callable[..., Server]
) -> None:
    fitting = start()
    fitting.served, fitting.state = dict(NEW), "not-current"
    with pytest.raises(UpdateError, match="1 tensors differ") as caught:
        caller(add(*servers, fitting), "catch_up", {"a": torch.full((3,), 8.0)})
    assert caught.value.kind == "digests-differ"
    assert (fitting.state, servers[2].state) == ("serving", "not-current")


def test_without_weights_at_hand_it_waits_for_the_next_push(caller: Caller, servers: list[Server]) -> None:
    with pytest.raises(UpdateError, match="expected the weights of version 7, or a push to all") as caught:
        caller(add(*servers), "catch_up")
    assert caught.value.kind == "no-source"
    caller(add(*servers), "push", NEW)
    assert [server.state for server in servers] == ["serving"] * 3


def test_the_path_that_was_pushed_last_is_pushed_again(
    tmp_path: Path, servers: list[Server], checkpoint: Path
) -> None:
    file = tmp_path / "servers"
    file.write_text("\n".join(add(*servers[:2])))
    with Replicas(ServersFile(file), KEY) as replicas:
        replicas.push(checkpoint, version="8")
        file.write_text("\n".join(add(*servers)))
        told = replicas.catch_up()
    assert told[servers[2].url].version == "8"
    assert contents(servers[2]) == contents(servers[0])


def test_a_path_is_not_kept_for_what_it_does_not_bring(servers: list[Server], checkpoint: Path) -> None:
    servers[2].state = "serving"
    with Replicas(add(*servers), KEY) as replicas:
        replicas.push(checkpoint)
        replicas.push(NEW)
        servers[2].state, servers[2].served = "not-current", dict(OLD)
        with pytest.raises(UpdateError, match="nothing is at hand"):
            replicas.catch_up()


@pytest.mark.parametrize(
    "states", [["serving"] * 3, ["not-current"] * 3, ["not-current", "no-weights", "asleep"]]
)
def test_where_nobody_is_late_or_nobody_current_nothing_is_done(
    caller: Caller, servers: list[Server], states: list[str]
) -> None:
    for server, state in zip(servers, states, strict=True):
        server.state = state
    assert caller(add(*servers), "catch_up", NEW) == {}
    assert {call for server in servers for call in server.calls} == {"GET /weights"}


def test_servers_of_different_versions_are_nobodys_example(caller: Caller, servers: list[Server]) -> None:
    servers[1].version = "6"
    with pytest.raises(UpdateError) as caught:
        caller(add(*servers), "catch_up", NEW)
    assert caught.value.kind == "replicas-differ"
    assert caught.value.details["found"] == {servers[0].url: "7", servers[1].url: "6"}


def test_what_is_replaced_meanwhile_is_not_caught_up_with(caller: Caller, servers: list[Server]) -> None:
    """Somebody else has pushed while the late server took version 7."""

    def newer(_: Any) -> bool:
        servers[0].epoch, servers[0].version = 8, "8"
        return False

    servers[2].faults["POST /updates/*/commit"] = [newer]
    with pytest.raises(UpdateError, match="no more epoch 7: catch up again") as caught:
        caller(add(*servers), "catch_up", NEW)
    assert (caught.value.kind, servers[2].state) == ("replicas-differ", "not-current")


@pytest.mark.parametrize("call", ["POST /updates", "POST /weights/current"])
def test_a_late_server_that_refuses_is_named(caller: Caller, servers: list[Server], call: str) -> None:
    servers[2].faults[call] = [answer(409, kind="paused")]
    with pytest.raises(UpdateError) as caught:
        caller(add(*servers), "catch_up", NEW)
    assert caught.value.details["failed"] == {servers[2].url: "paused it is"}
    assert servers[2].state == "not-current"


@pytest.mark.parametrize("name", ["version", "base_epoch", "partial", "id", "instances", "becomes_current"])
def test_what_the_others_tell_is_no_option(caller: Caller, servers: list[Server], name: str) -> None:
    with pytest.raises(ValueError, match=f"expected no {name}"):
        caller(add(*servers), "catch_up", NEW, **{name: 1})


@pytest.mark.parametrize("options", [{"base_epoch": 7}, {"base_epoch": 7, "partial": True}])
def test_what_needs_a_base_leaves_late_servers_out(
    caller: Caller,
    tmp_path: Path,
    servers: list[Server],
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "servers"
    file.write_text("\n".join(add(*servers)))
    done = caller(ServersFile(file), "push", NEW, **options)
    assert list(done) == add(*servers[:2])
    assert servers[2].state == "not-current"
    assert f"left out until they have caught up: {servers[2].url}" in caplog.text
    file.write_text(servers[2].url)
    with pytest.raises(UpdateError, match="no server is current") as caught:
        caller(ServersFile(file), "push", NEW, **options)
    assert caught.value.kind == "no-servers"


def test_a_server_that_a_file_names_twice_counts_once(
    caller: Caller, tmp_path: Path, servers: list[Server]
) -> None:
    file = tmp_path / "servers"
    file.write_text("\n".join([*add(*servers), f"{servers[0].url}/"]))
    assert list(caller(ServersFile(file), "push", NEW)) == add(*servers)


def test_both_classes_have_the_same_methods() -> None:
    assert {"push", "catch_up"} <= vars(Replicas).keys() & vars(AsyncReplicas).keys()
