# SPDX-License-Identifier: Apache-2.0
"""The client against a scripted server: what it sends, and what it makes of any answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load, save_file

from vllm_fp8ext.environment import ADMIN_KEY, URL
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.schema import PREFIX, PROBLEM

Answer = Callable[[httpx.Request], httpx.Response]


def update(state: str = "open") -> dict[str, Any]:
    return {
        "id": "u1",
        "state": state,
        "version": "epoch-1",
        "running": "keep",
        "base_epoch": None,
        "opened_at": 1.0,
        "tensors_required": 2,
        "tensors_missing": 0,
        "missing": [],
        "bytes": 0,
        "chunks": {},
        "problems": [],
        "seconds": {},
        "quantization_error": None,
        "result": None,
    }


class Server:
    """Answers from a table of overrides, else with success; keeps what it was sent."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.requests: list[httpx.Request] = []
        self.answers: dict[str, Answer] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        call = f"{request.method} {request.url.path.removeprefix(PREFIX)}"
        self.calls.append(call)
        self.requests.append(request)
        if call in self.answers:
            return self.answers[call](request)
        return httpx.Response(200, json=update("committed" if call.endswith("commit") else "open"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    monkeypatch.delenv(URL, raising=False)
    server = Server()
    original = httpx.Client
    monkeypatch.setattr(
        httpx, "Client", lambda **options: original(transport=httpx.MockTransport(server), **options)
    )
    return server


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for index in range(3):
        save_file({f"w{index}": torch.full((10 + index,), float(index))}, tmp_path / f"{index}.safetensors")
    return tmp_path


# --- errors


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (502, b"<html>Bad Gateway</html>"),
        (500, b""),
        (503, b'{"detail": "no type"}'),
        (422, b'{"type": "urn:fp8ext:problem:incomplete"}'),
        (400, b"[1, 2]"),
        (400, b'"text"'),
        (400, b"\xff\xfe"),
        (307, b""),
    ],
)
def test_an_answer_that_is_no_problem_document_is_told_as_it_is(
    server: Server, status: int, content: bytes
) -> None:
    server.answers["GET /weights"] = lambda request: httpx.Response(status, content=content)
    with Client("http://server") as client, pytest.raises(UpdateError) as caught:
        client.weights()
    assert (caught.value.kind, caught.value.status) == ("http", status)
    assert f"HTTP {status} from http://server{PREFIX}/weights" in str(caught.value)
    assert "VLLM_PLUGINS" not in str(caught.value)


def test_a_long_answer_is_cut(server: Server) -> None:
    server.answers["GET /weights"] = lambda request: httpx.Response(500, text="x" * 10_000)
    with Client("http://server") as client, pytest.raises(UpdateError) as caught:
        client.weights()
    assert len(str(caught.value)) < 300


def test_a_404_without_a_problem_says_how_the_routes_are_mounted(server: Server) -> None:
    server.answers["GET /weights"] = lambda request: httpx.Response(404, json={"detail": "Not Found"})
    with (
        Client("http://server") as client,
        pytest.raises(UpdateError, match=r"VLLM_PLUGINS=fp8ext.*FP8EXT_ADMIN_KEY"),
    ):
        client.weights()


def test_a_404_with_a_problem_is_the_problem(server: Server) -> None:
    body = {"type": PROBLEM + "unknown-update", "title": "t", "status": 404, "detail": "no update u1"}
    server.answers["GET /updates/u1"] = lambda request: httpx.Response(404, json=body)
    with Client("http://server") as client, pytest.raises(UpdateError, match=r"^no update u1$") as caught:
        client.update("u1")
    assert (caught.value.kind, caught.value.status, caught.value.details) == ("unknown-update", 404, {})


def test_a_server_that_cannot_be_reached_is_httpxs_error(server: Server) -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    server.answers["GET /weights"] = unreachable
    with Client("http://server") as client, pytest.raises(httpx.ConnectError):
        client.weights()


# --- where and as whom


@pytest.mark.parametrize(
    ("url", "variable", "host"),
    [
        ("http://given:1", "http://variable:2", "given:1"),
        ("http://given:1/", None, "given:1"),
        (None, "http://variable:2", "variable:2"),
        (None, None, "127.0.0.1:8000"),
    ],
)
def test_the_server_is_given_or_in_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch, url: str | None, variable: str | None, host: str
) -> None:
    if variable:
        monkeypatch.setenv(URL, variable)
    with Client(url) as client:
        client.update("u1")
    assert str(server.requests[0].url) == f"http://{host}{PREFIX}/updates/u1"


@pytest.mark.parametrize(
    ("key", "variable", "header"),
    [("given", "variable", "Bearer given"), (None, "variable", "Bearer variable"), (None, None, None)],
)
def test_the_key_is_given_or_in_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch, key: str | None, variable: str | None, header: str | None
) -> None:
    if variable:
        monkeypatch.setenv(ADMIN_KEY, variable)
    with Client("http://server", key) as client:
        client.update("u1")
    assert server.requests[0].headers.get("authorization") == header


# --- pushing


def test_push_sends_everything_and_commits(server: Server, checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Client("http://server") as client:
        done = client.push(
            checkpoint,
            version="step-1",
            base_epoch=0,
            running="recompute",
            chunk_bytes=84,
            progress=lambda *progress: seen.append(progress),
        )
    assert done.state == "committed"
    assert server.calls == [
        "POST /updates",
        "PUT /updates/u1/chunks/0",
        "PUT /updates/u1/chunks/1",
        "POST /updates/u1/commit",
    ]
    opened = json.loads(server.requests[0].content)
    assert opened == {"version": "step-1", "base_epoch": 0, "running": "recompute", "partial": False}
    sent = server.requests[1:3]
    assert [sorted(load(request.content)) for request in sent] == [["w0", "w1"], ["w2"]]
    assert load(sent[1].content)["w2"].tolist() == [2.0] * 12
    for request in sent:
        assert int(request.headers["content-length"]) == len(request.content)
        assert "transfer-encoding" not in request.headers
    total = sum(len(request.content) for request in sent)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("call", ["PUT /updates/u1/chunks/1", "POST /updates/u1/commit"])
@pytest.mark.parametrize("abandoned", [200, 500])
def test_a_refused_push_is_abandoned_and_raises_the_first_error(
    server: Server, checkpoint: Path, call: str, abandoned: int
) -> None:
    body = {"type": PROBLEM + "wrong-shape", "title": "t", "status": 422, "detail": "w2 is wrong"}
    server.answers[call] = lambda request: httpx.Response(422, json=body)
    server.answers["DELETE /updates/u1"] = lambda request: httpx.Response(abandoned, json=update("abandoned"))
    with Client("http://server") as client, pytest.raises(UpdateError, match="w2 is wrong"):
        client.push(checkpoint, chunk_bytes=84)
    assert server.calls[-2:] == [call, "DELETE /updates/u1"]


def test_an_update_that_was_not_opened_is_not_abandoned(server: Server, checkpoint: Path) -> None:
    server.answers["POST /updates"] = lambda request: httpx.Response(409, text="busy")
    with Client("http://server") as client, pytest.raises(UpdateError):
        client.push(checkpoint)
    assert server.calls == ["POST /updates"]


def test_a_checkpoint_that_cannot_be_read_opens_no_update(server: Server, tmp_path: Path) -> None:
    with Client("http://server") as client, pytest.raises(ValueError, match="found none"):
        client.push(tmp_path / "missing")
    assert server.calls == []


def test_a_truncated_checkpoint_is_never_committed(server: Server, checkpoint: Path) -> None:
    """Whether that shows before the update is opened or while the file is read."""
    file = checkpoint / "2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with Client("http://server") as client, pytest.raises(ValueError, match=r"2\.safetensors"):
        client.push(checkpoint)
    assert "POST /updates/u1/commit" not in server.calls
    assert server.calls == [] or server.calls[-1] == "DELETE /updates/u1"


def test_an_interrupted_push_is_abandoned(server: Server, checkpoint: Path) -> None:
    def interrupt(sent: int, total: int) -> None:
        raise KeyboardInterrupt

    with Client("http://server") as client, pytest.raises(KeyboardInterrupt):
        client.push(checkpoint, progress=interrupt)
    assert server.calls[-1] == "DELETE /updates/u1"


@pytest.mark.parametrize(
    ("method", "arguments", "call", "body"),
    [
        ("files", ("u1", Path("/data/x")), "POST /updates/u1/files", {"path": "/data/x"}),
        ("prepare", ("u1",), "POST /updates/u1/prepare", None),
        ("abandon", ("u1",), "DELETE /updates/u1", None),
        ("load", ("/data/x",), "POST /load", {"path": "/data/x", "running": "keep"}),
        ("open", (), "POST /updates", {"partial": False, "running": "keep"}),
    ],
)
def test_each_method_is_one_call(
    server: Server, method: str, arguments: tuple, call: str, body: object
) -> None:
    with Client("http://server") as client:
        assert getattr(client, method)(*arguments).id == "u1"
    assert server.calls == [call]
    assert (json.loads(server.requests[0].content) if body else server.requests[0].content) == (body or b"")
