# SPDX-License-Identifier: Apache-2.0
"""A server that joins another one: it answers nobody before it has the weights of the other."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import MODEL, Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import Client, Replicas, ServersFile

from .ask import complete
from .conftest import OPTIONS
from .plugins import variables

pytestmark = [pytest.mark.full, pytest.mark.alone]

START_SECONDS = 300


@pytest.fixture
def late(single: Server, tmp_path: Path) -> Iterator[Server]:
    """A server on the early checkpoint that is to be ready when it is current, with the key of the other."""
    settings = {"ready": "when_current"}
    server = Server(
        EARLY,
        tmp_path / "log",
        arguments=OPTIONS,
        settings=settings,
        variables=variables(tmp_path),
        key=single.key,
    )
    with server:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and server.process.poll() is None and not _lives(server):
            time.sleep(0.2)
        yield server


def _lives(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/version", timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def refused(server: Server) -> list[tuple[int, str]]:
    body = {"model": MODEL, "prompt": "1+2=", "max_tokens": 4}
    answers = [
        httpx.get(f"{server.url}/health", timeout=60, trust_env=False),
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False),
    ]
    return [(answer.status_code, answer.json()["error"]["type"]) for answer in answers]


def test_a_late_server_answers_nobody_before_it_has_the_weights_of_the_others(
    single: Server, late: Server, tmp_path: Path
) -> None:
    waits = [(503, "not-current")] * 2
    file = tmp_path / "servers"
    file.write_text(f"{single.url}\n{late.url}\n")
    assert refused(late) == waits
    with single.client() as first, late.client() as second:
        first.push(LATE, version="late")
        assert (second.weights().state, second.digests().version) == ("not-current", "epoch-0")
        with Replicas(ServersFile(file), single.key) as replicas:
            with pytest.raises(UpdateError, match="nothing is at hand"):
                replicas.catch_up()
            with pytest.raises(UpdateError) as caught:
                replicas.catch_up(EARLY)
            assert (caught.value.kind, list(caught.value.details["failed"])) == ("digests-differ", [late.url])
            assert refused(late) == waits
            _refuses_a_part(second)
            assert list(replicas.catch_up(LATE)) == [late.url]
            assert second.digests().digests == first.digests().digests
            assert second.verify().version == second.weights().version == "late"
            assert complete(late, "1+2=", 4)["choices"][0]["weight_versions"][0]["version"] == "late"
            assert httpx.get(f"{late.url}/health", timeout=60, trust_env=False).status_code == 200
            done = replicas.push(EARLY, version="early")
        served = [(update.result or {})["served_at"] for update in done.values()]
        assert abs(time.time() - max(served)) < START_SECONDS, "it is Unix time"
        assert {client.weights().version for client in (first, second)} == {"early"}


def _refuses_a_part(client: Client) -> None:
    with pytest.raises(UpdateError) as caught:
        client.open(partial=True, base_epoch=client.weights().epoch)
    assert caught.value.kind == "not-current"


def test_what_was_loaded_is_current_when_somebody_says_so(single: Server, late: Server) -> None:
    with (
        single.client() as first,
        late.client() as second,
        Replicas([single.url, late.url], single.key) as both,
    ):
        assert (first.weights().version, second.weights().version) == ("early", "epoch-0")
        assert both.catch_up()[late.url].version == "early", "nothing was sent"
        assert second.weights().epoch == 0
        assert second.verify().version == "early"
    answer = complete(late, "1+2=", 4)["choices"][0]
    assert answer["weight_versions"][0]["version"] == "early"
