# SPDX-License-Identifier: Apache-2.0
"""A file or DNS names the servers of a push, and some are not there."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.serve.client import Replicas, ServersDns, ServersFile
from vllm_fp8ext.serve.client.driver import BlockingDriver
from vllm_fp8ext.serve.client.flow import Endpoint, send
from vllm_fp8ext.serve.client.servers import ServerAddress

from .conftest import Caller
from .server import KEY, Server, drop


@pytest.fixture
def servers(start: Callable[..., Server]) -> list[Server]:
    return [start(), start()]


def write(file: Path, *servers: Server | str) -> None:
    file.write_text("".join(f"{each if isinstance(each, str) else each.url}  # one\n\n" for each in servers))


def free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def epochs(servers: list[Server]) -> list[int]:
    return [server.epoch for server in servers]


def test_a_file_is_read_anew_for_each_update(
    tmp_path: Path, servers: list[Server], start: Callable[..., Server], checkpoint: Path
) -> None:
    file = tmp_path / "servers"
    write(file, servers[0])
    with Replicas(ServersFile(file), KEY) as replicas:
        assert list(replicas.push(checkpoint)) == [servers[0].url]
        write(file, *servers)
        assert list(replicas.push(checkpoint)) == [server.url for server in servers]
        write(file, servers[1])
        replicas.push(checkpoint)
    assert epochs(servers) == [2, 2]


def test_a_server_where_nobody_listens_is_not_there(
    caller: Caller, tmp_path: Path, servers: list[Server], checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = free_url()
    write(tmp_path / "servers", *servers, gone)
    done = caller(ServersFile(tmp_path / "servers"), "push", checkpoint)
    assert list(done) == [server.url for server in servers]
    assert f"not there: {gone}" in caplog.text


def test_a_server_of_a_list_must_be_there(caller: Caller, servers: list[Server], checkpoint: Path) -> None:
    with pytest.raises(UpdateError) as caught:
        caller([servers[0].url, free_url()], "push", checkpoint, retries=0)
    assert caught.value.kind == "not-committed"
    assert servers[0].states in ([], ["abandoned"])


def test_a_server_that_does_not_answer_may_serve_and_stops_the_push(
    caller: Caller, tmp_path: Path, servers: list[Server], checkpoint: Path
) -> None:
    """It may be a network alone that has failed."""
    write(tmp_path / "servers", *servers)
    servers[1].faults["GET /weights"] = [drop()] * 9
    servers[1].faults["POST /updates"] = [drop()] * 9
    with pytest.raises(UpdateError) as caught:
        caller(ServersFile(tmp_path / "servers"), "push", checkpoint, retries=1)
    assert (caught.value.kind, list(caught.value.details["failed"])) == ("not-committed", [servers[1].url])


def test_two_addresses_of_one_server_are_one(
    caller: Caller, tmp_path: Path, servers: list[Server], checkpoint: Path
) -> None:
    other = servers[0].url.replace("127.0.0.1", "localhost")
    write(tmp_path / "servers", servers[0], other, servers[1])
    caller(ServersFile(tmp_path / "servers"), "push", checkpoint)
    assert [sum("PUT" in call for call in server.calls) for server in servers] == [1, 1]


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("", UpdateError, "names no server"),
        ("# none yet\n", UpdateError, "names no server"),
        ("rollout-0:8000", ValueError, "expected a URL"),
        ("http://a http://b", ValueError, "expected a URL"),
        (None, UpdateError, "No such file"),
    ],
)
def test_a_file_that_names_no_servers_is_told(
    tmp_path: Path, text: str | None, error: Any, match: str
) -> None:
    if text is not None:
        (tmp_path / "servers").write_text(text)
    with pytest.raises(error, match=match):
        ServersFile(tmp_path / "servers").addresses()


def test_nobody_there_is_an_error(caller: Caller, tmp_path: Path, checkpoint: Path) -> None:
    write(tmp_path / "servers", free_url())
    with pytest.raises(UpdateError, match="nobody listens") as caught:
        caller(ServersFile(tmp_path / "servers"), "push", checkpoint)
    assert caught.value.kind == "no-servers"


def resolver(places: list[tuple[int, str]]) -> Callable[..., Any]:
    def resolve(name: str, port: int, **_: Any) -> Any:
        assert name == "rollouts"
        if not places:
            raise socket.gaierror(-2, "Name or service not known")
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in places]

    return resolve


FOUR, SIX = socket.AF_INET, socket.AF_INET6


@pytest.mark.parametrize(
    ("url", "places", "expected"),
    [
        ("http://rollouts:8000", [(FOUR, "10.0.0.2"), (FOUR, "10.0.0.1")], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
        ("https://rollouts/a/", [(FOUR, "10.0.0.1"), (SIX, "fd00::1")], ["https://10.0.0.1:443/a"]),
        ("http://rollouts", [(SIX, "fd00::1"), (SIX, "fd00::1")], ["http://[fd00::1]:80"]),
    ],
)  # fmt: skip
def test_a_name_has_an_address_for_each_server(
    monkeypatch: pytest.MonkeyPatch, url: str, places: list[tuple[int, str]], expected: list[str]
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver(places))
    addresses = ServersDns(url).addresses()
    assert [address.url for address in addresses] == expected
    assert {address.host for address in addresses} == {
        f"rollouts:{expected[0].rpartition(':')[2].split('/')[0]}"
    }


def test_a_name_is_resolved_for_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[tuple[int, str]] = []
    monkeypatch.setattr(socket, "getaddrinfo", resolver(places))
    servers = ServersDns("http://rollouts:8000")
    with pytest.raises(UpdateError, match="rollouts can't be resolved") as caught:
        servers.addresses()
    assert caught.value.kind == "no-servers"
    places.append((FOUR, "10.0.0.1"))
    assert servers.addresses() == [ServerAddress("http://10.0.0.1:8000", "rollouts:8000")]
    places.append((FOUR, "10.0.0.2"))
    assert len(servers.addresses()) == 2


@pytest.mark.parametrize("url", ["rollouts:8000", "ftp://rollouts", "http://x:secret@rollouts", "http://"])
def test_a_url_of_dns_has_a_scheme_and_no_user(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServersDns(url)
    assert "secret" not in str(caught.value)


def test_a_push_by_name_asks_addresses_for_the_name(caller: Caller, servers: list[Server]) -> None:
    port = servers[0].url.rpartition(":")[2]
    done = caller(ServersDns(f"http://localhost:{port}"), "push", {"a": torch.ones(2)})
    assert list(done) == [servers[0].url]
    assert {headers["host"] for headers in servers[0].headers} == {f"localhost:{port}"}


def test_a_certificate_is_compared_with_the_name() -> None:
    endpoint = Endpoint.of("https://127.0.0.1:9", "k", timeout=1, retries=0, host="rollouts:9")
    request = endpoint.request("GET", "/weights")
    assert request.server_name == "rollouts"
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.extensions.get("sni_hostname"))
        return httpx.Response(200)

    driver = BlockingDriver(httpx.MockTransport(answer))
    driver.run(send(request))
    driver.close()
    assert asked == ["rollouts"]
