# SPDX-License-Identifier: Apache-2.0
"""What a server whose engine is poisoned still answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Response, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.poison_guard import PoisonGuard
from vllm_fp8ext.serve.problems import MEDIA_TYPE
from vllm_fp8ext.serve.schema import PROBLEM, Problem
from vllm_fp8ext.update.contract.update_errors import NO_CURRENT_WEIGHTS, NO_WEIGHTS, NOT_CURRENT

OPEN = ("/fp8ext/v1/weights", "/metrics", "/version", "/openapi.json", "/docs", "/redoc")
CLOSED = ("/v1/completions", "/v1/models", "/health", "/", "/fp8ext", "/x/fp8ext/v1/weights", "/v1/metrics")


class Engine:
    """`outcome`: what the next look tells."""

    poisoned: str | None = None
    outcome: str | Exception | None = None

    async def look(self) -> None:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.poisoned = self.outcome


@pytest.fixture
def engine() -> Engine:
    return Engine()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Neither a request nor a websocket."""
    app.state.begun = True
    yield


@pytest.fixture
def app(engine: Engine) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    @app.post("/v1/failing")
    async def failing() -> Response:
        return Response("the engine failed it", status_code=500)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def anything(path: str) -> str:
        return path

    app.add_middleware(
        PoisonGuard,
        reason=lambda: engine.poisoned,
        refresh=engine.look,
        healing=frozenset({"/start_weight_update"}),
    )
    return app


def asked(app: FastAPI, method: str, path: str, root: str = "") -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.request(method, path)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", [*OPEN, *CLOSED])
def test_a_sound_server_answers_everything(app: FastAPI, path: str) -> None:
    response = asked(app, "GET", path)
    assert (response.status_code, response.json()) == (200, path[1:])


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", OPEN)
def test_what_heals_or_looks_is_answered(app: FastAPI, engine: Engine, method: str, path: str) -> None:
    engine.poisoned = "rank 1: copy failed"
    assert asked(app, method, path).json() == path[1:]


def test_a_server_behind_a_prefix_is_healed_like_others(app: FastAPI, engine: Engine) -> None:
    engine.poisoned = "rank 1: copy failed"
    assert asked(app, "POST", "/api/fp8ext/v1/load", root="/api").status_code == 200
    assert asked(app, "POST", "/fp8ext/v1/load", root="/api").status_code == 200
    assert asked(app, "POST", "/api/v1/completions", root="/api").status_code == 503
    assert asked(app, "POST", "/api/fp8ext/v1/load").status_code == 503


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", CLOSED)
def test_everything_else_is_refused(app: FastAPI, engine: Engine, method: str, path: str) -> None:
    engine.poisoned = "rank 1: copy failed"
    response = asked(app, method, path)
    assert response.status_code == 503
    assert response.headers["content-type"] == MEDIA_TYPE
    result = Problem.model_validate(response.json())
    assert result.type == PROBLEM + "poisoned"
    assert "rank 1: copy failed" in result.detail
    engine.poisoned = None
    assert asked(app, method, path).status_code == 200


def test_a_server_without_weights_is_healthy_and_refuses_all_else(app: FastAPI, engine: Engine) -> None:
    engine.poisoned = NO_WEIGHTS
    assert asked(app, "GET", "/health").status_code == 200
    assert asked(app, "POST", "/start_weight_update").status_code == 200
    response = asked(app, "POST", "/v1/completions")
    assert (response.status_code, response.json()["type"]) == (503, PROBLEM + "no-weights")
    assert response.json()["error"]["type"] == "no-weights"


@pytest.mark.parametrize(
    ("reason", "kind"), [(NOT_CURRENT, "not-current"), (NO_CURRENT_WEIGHTS, "no-weights")]
)
def test_a_server_that_is_not_current_is_not_healthy(
    app: FastAPI, engine: Engine, reason: str, kind: str
) -> None:
    """A router sends it no requests, then."""
    engine.poisoned = reason
    for path in ("/health", "/v1/completions", "/v1/models"):
        response = asked(app, "GET", path)
        assert (response.status_code, response.json()["type"]) == (503, PROBLEM + kind)
    assert asked(app, "POST", "/fp8ext/v1/weights/current").status_code == 200
    assert asked(app, "GET", "/version").status_code == 200


def test_weights_come_by_other_ways_to_a_poisoned_server(app: FastAPI, engine: Engine) -> None:
    engine.poisoned = "rank 1: copy failed"
    assert asked(app, "POST", "/start_weight_update").status_code == 200


def test_a_client_of_the_openai_api_reads_why(app: FastAPI, engine: Engine) -> None:
    engine.poisoned = "rank 1: copy failed"

    async def complete() -> None:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(
            base_url="http://server/v1", api_key="-", http_client=http, max_retries=0
        ) as client:
            await client.completions.create(model="m", prompt="p")

    with pytest.raises(openai.InternalServerError, match="rank 1: copy failed") as caught:
        asyncio.run(complete())
    assert caught.value.status_code == 503
    assert (caught.value.type, caught.value.code) == ("poisoned", "503")


def test_websockets_are_refused_before_they_are_accepted(app: FastAPI, engine: Engine) -> None:
    with TestClient(app) as client:
        with client.websocket_connect("/v1/realtime") as socket:
            assert socket.receive_text() == "hello"
        engine.poisoned = "rank 1: copy failed"
        with pytest.raises(WebSocketDisconnect) as caught, client.websocket_connect("/v1/realtime"):
            pytest.fail("it was accepted")
    assert (caught.value.code, caught.value.reason) == (1013, "poisoned")


def test_a_poisoned_server_starts_and_ends(app: FastAPI, engine: Engine) -> None:
    engine.poisoned = "rank 1: copy failed"
    with TestClient(app):
        assert app.state.begun


def test_what_a_poisoned_engine_has_failed_is_refused(app: FastAPI, engine: Engine) -> None:
    """Before this server knew of it: an update may have ended half-way, in place, while the engine was asked for another."""
    engine.outcome = "update u ended half-way, in place"
    response = asked(app, "POST", "/v1/failing")
    assert (response.status_code, response.headers["content-type"]) == (503, MEDIA_TYPE)
    assert "update u ended half-way" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "outcome", [None, UpdateError("engine-dead", "it has ended", status=500), TimeoutError()]
)
def test_other_failures_are_told_as_they_are(app: FastAPI, engine: Engine, outcome: Any) -> None:
    engine.outcome = outcome
    response = asked(app, "POST", "/v1/failing")
    assert (response.status_code, response.text) == (500, "the engine failed it")
