# SPDX-License-Identifier: Apache-2.0
"""The documented OpenAPI against a real server: whatever fits it or breaks it, no answer is a failure of the server."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.demo.server import Server

from .ask import state

SCHEMA = Path(__file__).parents[2] / "docs" / "openapi.json"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "ignored_auth",
)


@pytest.mark.parametrize("examples", [8, pytest.param(20, marks=pytest.mark.full)])
def test_every_route_keeps_its_word(single: Server, tmp_path: Path, examples: int):
    body = (LATE / "model.safetensors").read_bytes()
    with single.client() as client:  # of an update that was begun nothing is left to roll back to
        id = client.open().id
        client.put_chunk(id, 0, body, len(body))
        client.abandon(id)
    before = state(single)
    line = [sys.executable, "-P", "-m", "schemathesis.cli", "run", str(SCHEMA), "--url", single.url]
    line += ["--header", f"Authorization: Bearer {single.key}", "--checks", ",".join(CHECKS)]
    line += [
        "--mode",
        "all",
        "--max-examples",
        str(examples),
        "--seed",
        "7",
        "--no-color",
        "--warnings",
        "off",
    ]
    line += ["--request-timeout", "60", "--continue-on-failure", "--generation-database", "none"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    with single.client() as client:
        open_update = client.weights().update
        if open_update:
            client.abandon(open_update)
    after = state(single)
    assert (after["digests"]["digests"], after["outputs"]) == (
        before["digests"]["digests"],
        before["outputs"],
    )
