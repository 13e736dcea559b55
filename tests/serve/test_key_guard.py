# SPDX-License-Identifier: Apache-2.0
"""Nothing of the server counts a call to the routes that comes without the admin key."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY

from vllm_fp8ext.serve.problems import MEDIA_TYPE
from vllm_fp8ext.serve.schema import PROBLEM

WITH_KEY = {"Authorization": "Bearer secret"}
PATHS = (
    "/fp8ext/v1/updates/{}/",
    "/fp8ext/v1/updates/{}",
    "/fp8ext/v1/updates/{}/chunks/0/",
    "/fp8ext/v1/{}",
    "/fp8ext/v1/",
    "/fp8ext/v1",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "PROPFIND")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[FastAPI]:
    """vLLM's metrics with our routes over them, as vLLM's server puts them together."""
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router
    from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins

    for collector in [
        value for name, value in REGISTRY._names_to_collectors.items() if name.startswith("http")
    ]:
        with contextlib.suppress(KeyError):  # it has other names too
            REGISTRY.unregister(collector)  # of another server in this process, whose like are not made twice
    monkeypatch.setenv("VLLM_PLUGINS", "fp8ext")
    monkeypatch.setenv("FP8EXT_ADMIN_KEY", "secret")
    app = FastAPI()

    @app.get("/other/{name}")
    async def other(name: str) -> str:
        return name

    attach_router(app)
    attach_endpoint_plugins(app, ("generate",))
    yield app
    REGISTRY.unregister(app.state.endpoint_plugins[0]._backend.metrics)


def series() -> set[tuple[str, ...]]:
    """Of vLLM's own metrics of HTTP: name and labels."""
    return {
        (sample.name, *sample.labels.values())
        for family in REGISTRY.collect()
        if family.name.startswith("http")
        for sample in family.samples
    }


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}], ids=["no key", "wrong key"])
def test_a_call_without_the_key_makes_no_series(app: FastAPI, headers: dict[str, str]) -> None:
    http = TestClient(app, headers=dict(headers), follow_redirects=False)
    http.get("/other/first")
    before = series()
    for number, (path, method) in enumerate(itertools.product(PATHS, METHODS)):
        answer = http.request(method, path.format(f"x{number}"))
        assert answer.status_code == (403 if headers else 401), (path, method)
        assert answer.headers["content-type"] == MEDIA_TYPE
    assert series() == before
    http.get("/other/second/")
    assert series() > before, "those of other routes are counted"


def test_refusals_are_counted_by_their_kind(app: FastAPI) -> None:
    http = TestClient(app)
    for headers in ({}, {"Authorization": "Bearer other"}, {}):
        http.get("/fp8ext/v1/nowhere", headers=headers)
    metrics = app.state.endpoint_plugins[0]._backend.metrics
    assert metrics._refusals == {"no-key": 2, "wrong-key": 1}


def test_with_the_key_the_routes_answer(app: FastAPI) -> None:
    http = TestClient(app, headers=WITH_KEY)
    assert http.get("/fp8ext/v1/nowhere").status_code == 404
    answer = http.post("/fp8ext/v1/updates", json={"nope": 1})
    assert answer.json()["type"] == PROBLEM + "invalid-request"


def test_a_server_behind_a_prefix_is_guarded_like_others(app: FastAPI) -> None:
    http = TestClient(app, root_path="/api")
    assert http.get("/api/fp8ext/v1/updates/x/").status_code == 401
    assert http.get("/fp8ext/v1/updates/x/").status_code == 401
    assert http.get("/api/other/x").json() == "x"
