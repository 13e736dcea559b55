# SPDX-License-Identifier: Apache-2.0
"""Refusals on their way out of a guarded route, and back into errors by the client."""

import gzip
import json
import pickle
from collections.abc import Iterator

import fastapi
import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import body_process
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.body_checks import Limits
from vllm_fp8ext.serve.body_process import BodyProcess
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.problems import MEDIA_TYPE, RESPONSES, guarded_route, problem
from vllm_fp8ext.serve.schema import PROBLEM, OpenUpdate, Problem
from vllm_fp8ext.update.contract.chunk import Chunk
from vllm_fp8ext.update.contract.update_errors import PROBLEMS_LISTED, incomplete, refusal

HEADERS = {"Authorization": "Bearer secret"}


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: int
    more: list[int] = []


@pytest.fixture
def kinds() -> list[str]:
    """The kind of every refusal, in order."""
    return []


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> Iterator[BodyProcess]:
    """Of which none goes to another process, which would not know the model of these tests."""
    monkeypatch.setattr(body_process, "_SMALL", 1 << 20)
    bodies = BodyProcess()
    yield bodies
    bodies.close()


@pytest.fixture
def http(kinds: list[str], bodies: BodyProcess) -> TestClient:
    routes = APIRouter(
        route_class=guarded_route(AdminKey("secret"), kinds.append, bodies), responses=RESPONSES
    )

    @routes.post("/echo")
    async def echo(body: Request) -> int:
        return body.count

    @routes.get("/refused")
    async def refused() -> None:
        raise UpdateError("incomplete", "2 are missing", status=422, missing=["a", "b"])

    @routes.get("/failing")
    async def failing() -> None:
        raise KeyError("chunk")

    @routes.get("/failing/{name}")
    async def failing_for(name: str) -> None:
        raise KeyError(name)

    @routes.put("/upload")
    async def upload(request: fastapi.Request) -> int:
        return len(await request.body())

    app = FastAPI()
    app.include_router(routes)
    return TestClient(app)


def test_a_right_key_gets_through(http: TestClient, kinds: list[str]) -> None:
    response = http.post("/echo", json={"count": 3}, headers=HEADERS)
    assert (response.status_code, response.json()) == (200, 3)
    assert kinds == []


def test_every_refusal_is_counted_by_its_kind(http: TestClient, kinds: list[str]) -> None:
    http.get("/refused")
    http.get("/refused", headers={"Authorization": "Bearer other"})
    http.get("/refused", headers=HEADERS)
    http.post("/echo", json={}, headers=HEADERS)
    http.get("/failing", headers=HEADERS)
    http.post("/echo", content=pieces(), headers=HEADERS)
    assert kinds == ["no-key", "wrong-key", "incomplete", "invalid-request", "internal", "length-required"]


def test_a_failure_of_our_own_is_a_problem_document_and_logged(
    http: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    response = http.get("/failing", headers=HEADERS)
    assert (response.status_code, response.headers["content-type"]) == (500, MEDIA_TYPE)
    assert response.json()["type"] == PROBLEM + "internal"
    assert "KeyError" in response.json()["detail"]
    assert "GET /failing failed" in caplog.text


def pieces() -> Iterator[bytes]:
    """A body without a length: httpx sends it in chunks."""
    yield b'{"count": 3}'


def test_a_posted_body_needs_a_length(http: TestClient) -> None:
    response = http.post("/echo", content=pieces(), headers=HEADERS)
    assert response.request.headers["transfer-encoding"] == "chunked"
    assert response.status_code == 411
    assert response.json()["type"] == PROBLEM + "length-required"


def test_a_posted_body_is_bounded(http: TestClient, bodies: BodyProcess) -> None:
    """By its length alone, before it is read."""
    body = b'{"count": 3}'
    bodies._here.limits = Limits(json_bytes=len(body))
    headers = {**HEADERS, "Content-Type": "application/json"}
    assert http.post("/echo", content=body, headers=headers).json() == 3
    response = http.post("/echo", content=body + b" ", headers=headers)
    assert response.status_code == 413
    assert response.json()["type"] == PROBLEM + "body-too-large"
    assert response.json()["limit"] == len(body)


@pytest.mark.parametrize("length", ["many", "-1", "1.5", "", str(1 << 40), "9" * 5000])
def test_a_length_that_is_none_is_refused(http: TestClient, length: str) -> None:
    response = http.post("/echo", content=b"", headers={**HEADERS, "Content-Length": length})
    assert response.status_code == 413
    assert response.json()["type"] == PROBLEM + "body-too-large"


@pytest.mark.parametrize("encoding", ["gzip", "identity, gzip", "deflate", "br", "zstd", "x" * 3000])
@pytest.mark.parametrize("call", ["PUT /upload", "POST /echo"])
def test_a_compressed_body_is_refused(http: TestClient, call: str, encoding: str) -> None:
    method, path = call.split()
    headers = {**HEADERS, "Content-Encoding": encoding}
    response = http.request(method, path, content=gzip.compress(b'{"count": 3}'), headers=headers)
    assert (response.status_code, response.json()["type"]) == (415, PROBLEM + "unsupported-encoding")
    assert "expected none" in response.json()["detail"]
    assert len(response.content) < 1000


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
def test_a_body_may_say_that_it_is_not_compressed(http: TestClient, encoding: str) -> None:
    headers = {**HEADERS, "Content-Encoding": encoding}
    assert http.post("/echo", json={"count": 3}, headers=headers).json() == 3
    assert http.put("/upload", content=b"12345", headers=headers).json() == 5


def test_an_upload_is_bounded_by_others(http: TestClient, bodies: BodyProcess) -> None:
    """Chunks have a limit of their own, which is larger."""
    bodies._here.limits = Limits(json_bytes=10)
    assert http.put("/upload", content=b"x" * 11, headers=HEADERS).json() == 11
    assert http.post("/echo", content=b"x" * 11, headers=HEADERS).status_code == 413


def test_the_key_is_asked_for_before_the_body_is_looked_at(http: TestClient) -> None:
    response = http.post("/echo", content=pieces())
    assert response.status_code == 401


def test_the_key_is_asked_for_before_the_body_is_read(http: TestClient) -> None:
    response = http.post("/echo", content=b"{ not json")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["content-type"] == MEDIA_TYPE
    wrong = http.post("/echo", content=b"{ not json", headers={"Authorization": "Bearer other"})
    assert wrong.status_code == 403
    assert "www-authenticate" not in wrong.headers


def test_a_refusal_is_a_problem_document(http: TestClient) -> None:
    response = http.get("/refused", headers=HEADERS)
    assert response.status_code == 422
    assert response.headers["content-type"] == MEDIA_TYPE
    assert response.json() == {
        "type": PROBLEM + "incomplete",
        "title": "incomplete",
        "status": 422,
        "detail": "2 are missing",
        "missing": ["a", "b"],
    }
    Problem.model_validate(response.json())


@pytest.mark.parametrize("body", [{"json": {"count": "many"}}, {"json": {}}, {"content": b"{ not json"}])
def test_an_invalid_request_is_a_problem_document_too(http: TestClient, body: dict) -> None:
    response = http.post("/echo", headers=HEADERS, **body)
    assert response.status_code == 422
    assert response.headers["content-type"] == MEDIA_TYPE
    result = response.json()
    assert result["type"] == PROBLEM + "invalid-request"
    assert result["problems"]
    assert all(item["where"].startswith("body") and item["message"] for item in result["problems"])


def test_of_very_many_problems_the_first_are_told(http: TestClient) -> None:
    """Answers, and what it takes to write them, stay small beside the bodies that cause them."""
    response = http.post("/echo", headers=HEADERS, json={"count": 1, "more": ["x"] * 3000})
    assert response.status_code == 422
    assert len(response.json()["problems"]) == PROBLEMS_LISTED
    assert response.json()["problem_count"] == 3000
    assert response.json()["detail"].endswith(f"; and {3000 - PROBLEMS_LISTED} more")


def test_of_very_many_bad_tensors_the_first_are_told() -> None:
    result = [{"kind": "unknown-tensor", "tensor": f"model.{number}"} for number in range(300_000)]
    errors = [
        refusal(result),
        incomplete(["a"], 2, result),
        incomplete(["a"], 2, result[:PROBLEMS_LISTED], count=len(result)),
    ]
    for error in errors:
        assert error.details["problems"] == result[:PROBLEMS_LISTED]
        assert error.details["problem_count"] == 300_000
        assert str(error).endswith("model.7; and 299992 more")
        assert len(problem(error).body) < 10_000


def test_a_chunk_keeps_the_first_of_very_many_problems() -> None:
    chunk = Chunk(frozenset("a"), 1)
    chunk.done([{"kind": "non-finite", "tensor": str(number)} for number in range(3000)])
    assert (len(chunk.problems), chunk.problem_count, chunk.busy) == (PROBLEMS_LISTED, 3000, False)


def test_names_of_a_clients_own_are_told_in_part(http: TestClient) -> None:
    response = http.post("/echo", headers=HEADERS, json={"count": 1, "more": "x" * 9_000, "y" * 10_000: 1})
    assert response.status_code == 422
    assert len(response.content) < 3000


@pytest.mark.parametrize(
    "error",
    [
        UpdateError("stale-base", "the update was made for epoch 1", expected=1, found=2),
        UpdateError("no-key", "expected a key", status=401),
        UpdateError(
            "invalid-tensors", "ä; ö", status=422, problems=[{"kind": "wrong-shape", "expected": [1, 2]}]
        ),
    ],
    ids=lambda error: error.kind,
)
def test_the_client_raises_what_the_server_raised(error: UpdateError) -> None:
    document = problem(error)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(document.status_code, content=document.body, headers=dict(document.headers))

    with (
        Client("http://server", transport=httpx.MockTransport(answer)) as client,
        pytest.raises(UpdateError) as caught,
    ):
        client.weights()
    assert caught.value.as_dict() == error.as_dict()
    assert UpdateError.from_dict(json.loads(json.dumps(error.as_dict()))).as_dict() == error.as_dict()
    # as actors and pools raise what their workers raised
    assert pickle.loads(pickle.dumps(error)).as_dict() == error.as_dict()


def test_details_cannot_hide_the_problem_itself() -> None:
    body = json.loads(problem(UpdateError("paused", "resume first", title="x", type="y", detail="z")).body)
    assert (body["type"], body["title"], body["detail"]) == (PROBLEM + "paused", "paused", "resume first")


def test_a_failure_shows_no_clients_text_as_it_is(http: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    http.get("/failing/a%0Ab%E2%80%AEc%1b[2J", headers=HEADERS)
    assert "GET /failing/a\\nb\\u202ec\\x1b[2J failed\n" in caplog.text
    assert "KeyError" in caplog.text
    assert not {"\u202e", "\x1b"} & set(caplog.text)


@pytest.mark.parametrize("character", ["\n", "\x7f", "\x85", "\x9b", "\u2028", "\u2029"])
def test_a_version_is_one_line(character: str) -> None:
    """It is logged, and shown in terminals."""
    with pytest.raises(ValidationError, match="version"):
        OpenUpdate(version=f"step{character}1")
    assert OpenUpdate(version="Schritt\u00a01 – ä").version == "Schritt\u00a01 – ä"
