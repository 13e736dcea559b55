# SPDX-License-Identifier: Apache-2.0
"""Single calls: what is sent, as whom, and what is made of any answer."""

import inspect
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save
from torch import ones

from vllm_fp8ext.environment import ADMIN_KEY, URL
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import AsyncClient, AsyncReplicas, Client, Replicas
from vllm_fp8ext.serve.schema import PREFIX, Canary, TensorClaim

from .conftest import Caller
from .server import KEY, Server, answer

# --- answers


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (500, b""),
        (500, b"<html>no</html>"),
        (422, b'{"type": "urn:fp8ext:problem:incomplete"}'),
        (400, b"[1, 2]"),
        (400, b'"text"'),
        (400, b"\xff\xfe"),
        (307, b""),
        (200, b""),
        (200, b"<html>a proxy's page</html>"),
        (200, b"\xff\xfe"),
        (200, b"[]"),
        (200, b'{"epoch": 1}'),
        (204, b""),
    ],
)
def test_an_answer_that_is_not_of_this_api_is_told_as_it_is(
    caller: Caller, server: Server, status: int, content: bytes
) -> None:
    server.faults["GET /weights"] = [answer(status, content)]
    with pytest.raises(UpdateError) as caught:
        caller(server.url, "weights")
    assert (caught.value.kind, caught.value.status) == ("http", status)
    assert f"HTTP {status} from {server.url}{PREFIX}/weights" in str(caught.value)
    assert "VLLM_PLUGINS" not in str(caught.value)


def test_a_long_answer_is_cut(caller: Caller, server: Server) -> None:
    server.faults["GET /weights"] = [answer(500, b"x" * 10_000)]
    with pytest.raises(UpdateError) as caught:
        caller(server.url, "weights")
    assert len(str(caught.value)) < 300


def test_a_404_without_a_problem_says_how_the_routes_are_mounted(caller: Caller, server: Server) -> None:
    server.faults["GET /weights"] = [answer(404, b'{"detail": "Not Found"}')]
    with pytest.raises(UpdateError, match=r"VLLM_PLUGINS=fp8ext.*FP8EXT_ADMIN_KEY"):
        caller(server.url, "weights")


def test_a_url_of_the_openai_api_is_named(caller: Caller, server: Server) -> None:
    server.faults[f"GET /v1{PREFIX}/weights"] = [answer(404, b'{"detail": "Not Found"}')]
    with pytest.raises(UpdateError, match=r"root as its URL, without the /v1") as caught:
        caller(f"{server.url}/v1/", "weights")
    assert "VLLM_PLUGINS" not in str(caught.value)


def test_a_404_with_a_problem_is_the_problem(caller: Caller, server: Server) -> None:
    with pytest.raises(UpdateError, match=r"^no update u1$") as caught:
        caller(server.url, "update", "u1")
    assert (caught.value.kind, caught.value.status, caught.value.details) == ("unknown-update", 404, {})


def test_a_server_that_cannot_be_reached_is_httpxs_error(caller: Caller, server: Server) -> None:
    server.stop()
    with pytest.raises(httpx.ConnectError):
        caller(server.url, "weights", retries=1)


# --- where and as whom


@pytest.mark.parametrize("suffix", ["", "/"])
@pytest.mark.parametrize("given", [True, False])
def test_the_server_is_given_or_in_the_environment(
    caller: Caller, server: Server, monkeypatch: pytest.MonkeyPatch, given: bool, suffix: str
) -> None:
    monkeypatch.setenv(URL, "http://127.0.0.1:1" if given else server.url + suffix)
    assert caller(server.url + suffix if given else None, "weights").epoch == 0


def test_without_any_the_server_is_port_8000_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL, raising=False)
    with Client() as client:
        assert client._subject.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("key", "variable", "header"),
    [(KEY, "variable", f"Bearer {KEY}"), (None, KEY, f"Bearer {KEY}"), (None, None, None)],
)
def test_the_key_is_given_or_in_the_environment(
    caller: Caller,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    variable: str | None,
    header: str | None,
) -> None:
    if variable:
        monkeypatch.setenv(ADMIN_KEY, variable)
    if header:
        caller(server.url, "weights", key=key)
    else:
        with pytest.raises(UpdateError, match="admin key"):
            caller(server.url, "weights", key=key)
    assert server.headers[0].get("authorization") == header


def test_the_key_is_in_no_repr() -> None:
    with Client("http://server", KEY) as client:
        assert KEY not in repr(client._subject)


# --- what is sent


@pytest.mark.parametrize(
    ("method", "arguments", "named", "call", "body"),
    [
        ("files", ("u1", Path("/data/x")), {}, "POST /updates/u1/files", {"path": "/data/x"}),
        ("prepare", ("u1",), {}, "POST /updates/u1/prepare", None),
        ("commit", ("u1",), {"wait_seconds": 5.0}, "POST /updates/u1/commit", None),
        ("abandon", ("u1",), {}, "DELETE /updates/u1", None),
        ("update", ("u1",), {}, "GET /updates/u1", None),
        ("rollback", (), {}, "POST /rollback", {"running": "keep"}),
        (
            "rollback",
            ("wait",),
            {"wait_seconds": 2.5},
            "POST /rollback",
            {"running": "wait", "wait_seconds": 2.5},
        ),
        (
            "load",
            ("/data/x",),
            {"version": "v", "base_epoch": 0, "running": "abort", "canary": Canary(max_perplexity=9.0)},
            "POST /load",
            {
                "path": "/data/x",
                "version": "v",
                "base_epoch": 0,
                "running": "abort",
                "canary": {"max_perplexity": 9.0},
            },
        ),
        (
            "open",
            (),
            {"id": "u1", "running": "wait", "wait_seconds": 1.0, "tensors": {"a": TensorClaim(shape=[2])}},
            "POST /updates",
            {
                "id": "u1",
                "partial": False,
                "becomes_current": True,
                "sparse": False,
                "running": "wait",
                "wait_seconds": 1.0,
                "tensors": {"a": {"shape": [2]}},
            },
        ),
    ],
)
def test_each_method_is_one_call(
    caller: Caller, server: Server, method: str, arguments: tuple, named: dict[str, Any], call: str, body: Any
) -> None:
    if method not in ("open", "load"):
        caller(server.url, "open", id="u1")
    before = len(server.calls)
    caller(server.url, method, *arguments, **named)
    assert server.calls[before:] == [call]
    assert (json.loads(server.bodies[-1]) if body else server.bodies[-1]) == (body or b"")


def test_an_id_is_made_up_for_each_update(caller: Caller, server: Server) -> None:
    first = caller(server.url, "open").id
    caller(server.url, "abandon", first)
    assert first != caller(server.url, "open").id


@pytest.mark.parametrize("wrap", [lambda body: body, lambda body: [body[:5], body[5:]], lambda b: iter([b])])
def test_a_chunk_is_bytes_or_pieces(caller: Caller, server: Server, wrap: Any) -> None:
    body = save({"a": ones(3)})
    caller(server.url, "open", id="u1")
    update = caller(server.url, "put_chunk", "u1", 7, wrap(body), len(body))
    assert (update.chunks["7"].bytes, server.chunks["u1"]["7"]) == (len(body), body)
    assert server.headers[-1]["content-length"] == str(len(body))
    assert "content-digest" not in server.headers[-1]


def test_pieces_need_a_length(caller: Caller, server: Server) -> None:
    with pytest.raises(ValueError, match="expected the length of chunk 7"):
        caller(server.url, "put_chunk", "u1", 7, iter([b"x"]))
    assert server.calls == []


def test_a_wrong_digest_is_refused(caller: Caller, server: Server) -> None:
    caller(server.url, "open", id="u1")
    with pytest.raises(UpdateError) as caught:
        caller(server.url, "put_chunk", "u1", 0, save({"a": ones(3)}), sha256=bytes(32))
    assert caught.value.kind == "digest-mismatch"
    assert server.calls[1:] == ["PUT /updates/u1/chunks/0"]


# --- one implementation


@pytest.mark.parametrize(("blocking", "awaited"), [(Client, AsyncClient), (Replicas, AsyncReplicas)])
def test_both_classes_have_the_same_methods(blocking: type, awaited: type) -> None:
    def methods(kind: type) -> dict[str, str]:
        return {
            name: str(inspect.signature(value))
            for name, value in vars(kind).items()
            if callable(value) and not name.startswith("_")
        }

    assert methods(blocking) == methods(awaited)
    assert "push" in methods(blocking)
    for name in methods(blocking):
        assert inspect.iscoroutinefunction(getattr(awaited, name))
        assert getattr(awaited, name).__doc__ == getattr(blocking, name).__doc__ != ""
