# SPDX-License-Identifier: Apache-2.0
"""Bodies from outside: refused by size, by counts, or parsed where they hold up nobody."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.body_checks import BodyChecks, Limits
from vllm_fp8ext.serve.body_process import BodyProcess
from vllm_fp8ext.serve.routes import router
from vllm_fp8ext.serve.schema import PROBLEM
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.update_errors import PROBLEMS_LISTED

NAMES = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(35)]
MANIFEST = Manifest(
    {name: TensorSpec(name, (256, 640), "bfloat16") for name in NAMES}, frozenset(), {}, "fp32", 1
)
LIMITS = Limits.of(MANIFEST)
OPEN = "vllm_fp8ext.serve.schema:OpenUpdate"
RECEIVE = "vllm_fp8ext.serve.schema:Receive"


@pytest.fixture(scope="module")
def known() -> Iterator[BodyProcess]:
    """A process that knows the manifest."""
    bodies = BodyProcess()
    asyncio.run(bodies.know(MANIFEST.as_dict()))
    yield bodies
    bodies.close()


@pytest.fixture
def elsewhere(known: BodyProcess, monkeypatch: pytest.MonkeyPatch) -> BodyProcess:
    """It, while this process checks nothing."""

    def run(*_: Any) -> Any:
        raise AssertionError("it was checked in the server's own process")

    monkeypatch.setattr(BodyChecks, "run", run)
    return known


def refused(call: Awaitable[Any]) -> UpdateError:
    async def main() -> None:
        await call

    with pytest.raises(UpdateError) as caught:
        asyncio.run(main())
    return caught.value


def claims(names: list[str], indent: int | None = None) -> bytes:
    claim = {"shape": [256, 640], "dtype": "bfloat16", "sha256": "0" * 64}
    return json.dumps({"tensors": dict.fromkeys(names, claim)}, indent=indent).encode()


def header(names: list[str]) -> bytes:
    return json.dumps(
        {name: {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]} for name in names}
    ).encode()


def test_all_that_is_claimed_of_a_whole_checkpoint_is_taken(elsewhere: BodyProcess) -> None:
    """With the scales of all weights, and a canary that is as long as may be."""
    body = json.loads(claims(NAMES)) | {"canary": {"prompts": [[151_000] * 4096] * 64}}
    content = json.dumps(body).encode()
    assert len(content) <= LIMITS.json_bytes
    fields = asyncio.run(elsewhere.json(OPEN, content))
    assert fields["tensors"] == body["tensors"]
    assert fields["canary"] == body["canary"] | {"max_perplexity": None}
    assert fields["running"] == "keep"
    stored = asyncio.run(elsewhere.header(header(NAMES), 8 + len(header(NAMES)), "chunk 0"))
    assert [tensor.spec for tensor in stored] == [TensorSpec(name, (0,), "bfloat16") for name in NAMES]


DOTS = "a." * 30_000


def strangers(count: int) -> list[str]:
    """Names of no tensor."""
    return [f"{number:x}" for number in range(count)]


HOSTILE: dict[str, tuple[str, Callable[[], bytes], str, int]] = {
    "300,000 claims": (OPEN, lambda: claims(strangers(300_000)), "body-too-large", 413),
    "more claims than can be": (
        *(OPEN, lambda: claims(NAMES + strangers(LIMITS.tensors)), "too-many-tensors", 413),
    ),
    "unknown claims": (OPEN, lambda: claims(NAMES + strangers(200)), "unknown-tensor", 422),
    "a name of 60,000 dots": (OPEN, lambda: claims([DOTS]), "invalid-request", 422),
    "prompts": (
        *(OPEN, lambda: b'{"canary": {"prompts": [' + b"[]," * 300_000 + b"[]]}}", "body-too-large", 413),
    ),
    "brackets": (OPEN, lambda: b"[" * 100_000, "body-too-large", 413),
    "wrong tokens": (
        OPEN,
        lambda: json.dumps({"canary": {"prompts": [[""] * 4000] * 64}}).encode(),
        "invalid-request",
        422,
    ),
    "fields": (
        OPEN,
        lambda: json.dumps({f"x{number}": 1 for number in range(5000)}).encode(),
        "invalid-request",
        422,
    ),
    "a long field": (OPEN, lambda: json.dumps({"y" * 60_000: 1}).encode(), "invalid-request", 422),
    "tensors that are none": (
        *(RECEIVE, lambda: b'{"tensors": [' + b"{}," * 300_000 + b"{}]}", "body-too-large", 413),
    ),
    "some tensors that are none": (
        *(RECEIVE, lambda: b'{"tensors": [' + b"{}," * 500 + b"{}]}", "invalid-request", 422),
    ),
}
"""By name: the model, what makes the body, and the kind and status of the refusal."""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_refused_elsewhere(elsewhere: BodyProcess, name: str) -> None:
    model, content, kind, status = HOSTILE[name]
    error = refused(elsewhere.json(model, content()))
    assert (error.kind, error.status) == (kind, status), error
    answer = json.dumps(error.as_dict())
    assert len(answer) < 64_000
    problems = error.details.get("problems", [])
    assert len(problems) <= PROBLEMS_LISTED
    assert len(problems) <= error.details.get("problem_count", 0)


@pytest.mark.parametrize(
    ("names", "kind", "status"),
    [
        (strangers(5000), "too-many-tensors", 413),
        (strangers(300), "unknown-tensor", 422),
        ([DOTS], "invalid-name", 422),
        ([*NAMES, "a\x1bb"], "invalid-name", 422),
        ([*NAMES, "a\u2028b"], "invalid-name", 422),
        ([*NAMES, ""], "invalid-name", 422),
    ],
    ids=["many", "unknown", "dots", "control", "line end", "empty"],
)
def test_hostile_headers_are_refused_elsewhere(
    elsewhere: BodyProcess, names: list[str], kind: str, status: int
) -> None:
    content = header(names)
    error = refused(elsewhere.header(content, 8 + len(content), "chunk 0"))
    assert (error.kind, error.status) == (kind, status), error
    assert len(json.dumps(error.as_dict())) < 64_000


@pytest.mark.parametrize("filler", [0, 5000], ids=["small", "large"])
@pytest.mark.parametrize("text", ["\\ud800", "\\udfff", "\\u0000", "a\\u001b", "\\u2028"])
def test_characters_that_nobody_can_be_told_are_refused(known: BodyProcess, text: str, filler: int) -> None:
    """In every form of text that a body may have, before an engine sees them."""
    claim, space = '{"dtype": "bfloat16"}', " " * filler
    for content in (
        f'{{"tensors": {{"{text}": {claim}}}{space}}}',
        f'{{"version": "{text}"{space}}}',
        f'{{"id": "{text}"{space}}}',
        f'{{"kv_scales": {{"scales": {{"{text}": {{"k": 1.0, "v": 1.0}}}}}}{space}}}',
        f'{{"{text}": 1{space}}}',
    ):
        error = refused(known.json(OPEN, content.encode()))
        assert (error.kind, error.status) == ("invalid-request", 422), content
        json.dumps(error.as_dict(), ensure_ascii=False).encode()


class Calls:
    """An engine that must not be asked."""

    async def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the engine was asked")


def test_what_is_too_large_is_refused_before_it_is_read(elsewhere: BodyProcess) -> None:
    backend = Backend(CollectorRegistry())
    backend.bodies.close()
    backend.bodies, backend.engine = elsewhere, Calls()  # type: ignore[assignment]
    app = FastAPI()
    app.include_router(router(AdminKey("secret"), backend))

    class Unread(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            raise AssertionError("it was read")
            yield b""

    async def answer() -> httpx.Response:
        headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            length = {"Content-Length": str(63 << 20)}
            return await http.post("/fp8ext/v1/updates", content=Unread(), headers=headers | length)

    result = asyncio.run(answer())
    assert (result.status_code, result.json()["type"]) == (413, PROBLEM + "body-too-large")
    assert result.json()["limit"] == LIMITS.json_bytes < 16 << 20


def test_a_process_that_ended_is_started_again() -> None:
    bodies = BodyProcess()
    try:
        for _ in range(2):
            assert asyncio.run(bodies.json(OPEN, claims(NAMES, indent=2)))["tensors"].keys() == set(NAMES)
            assert bodies._process is not None
            bodies._process.kill()
            bodies._process.wait()
            error = refused(bodies.json(OPEN, claims(NAMES, indent=2)))
            assert (error.kind, error.status) == ("internal", 500)
    finally:
        bodies.close()


def test_the_process_ends_with_its_server() -> None:
    """However that ends."""
    script = """
import asyncio, os, signal
from vllm_fp8ext.serve.body_process import BodyProcess
bodies = BodyProcess()
asyncio.run(bodies.json("vllm_fp8ext.serve.schema:Wake", b"{" + b" " * 5000 + b"}"))
print(bodies._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert done.returncode == -signal.SIGKILL
    descriptor = None
    try:
        descriptor = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    try:
        import select

        assert select.select([descriptor], [], [], 60)[0], "it goes on"
    finally:
        os.close(descriptor)
