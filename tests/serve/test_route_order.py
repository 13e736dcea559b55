# SPDX-License-Identifier: Apache-2.0
"""Routes of ours answer in place of vLLM's, whatever vLLM makes of two with one path."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from vllm_fp8ext.serve.route_order import replacing


def add(app: FastAPI, path: str, name: str, *methods: str, shown: bool = False) -> None:
    app.add_api_route(path, lambda: name, methods=list(methods), include_in_schema=shown)


@pytest.fixture
def app() -> FastAPI:
    """One with routes of somebody else, a part mounted among them."""
    made = FastAPI()
    add(made, "/pause", "theirs", "POST", "GET")
    add(made, "/resume", "theirs", "POST", shown=True)
    add(made, "/reset", "theirs", "POST", shown=True)
    made.mount("/part", Starlette(routes=[Route("/in", lambda _: PlainTextResponse("theirs"))]))
    return made


def test_what_is_added_answers_its_methods_alone(app: FastAPI) -> None:
    with replacing(app):
        add(app, "/pause", "ours", "POST")
        add(app, "/part/own", "ours", "GET")
    client = TestClient(app)
    assert client.post("/pause").json() == "ours"
    assert client.get("/pause").json() == "theirs"
    assert client.post("/resume").json() == "theirs"
    assert client.get("/part/own").json() == "ours"
    assert client.get("/part/in").text == "theirs"


def test_an_answer_that_is_replaced_is_not_told_of(app: FastAPI) -> None:
    with replacing(app):
        add(app, "/resume", "ours", "POST")
    assert set(app.openapi()["paths"]) == {"/reset"}
