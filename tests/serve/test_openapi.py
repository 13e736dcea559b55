# SPDX-License-Identifier: Apache-2.0
"""The committed OpenAPI document against the routes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python.processes import run

from vllm_fp8ext.update.transports.registry import TRANSPORTS

PROJECT = Path(__file__).resolve().parent.parent.parent
DOCUMENT: dict[str, Any] = json.loads((PROJECT / "docs" / "openapi.json").read_text(encoding="utf-8"))
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


def test_the_document_is_up_to_date() -> None:
    line = [sys.executable, "-P", str(PROJECT / "scripts" / "openapi"), "--check"]
    done = run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_holds_our_routes_alone() -> None:
    announced = [transport for transport in TRANSPORTS.values() if transport.route is not None]
    assert len(OPERATIONS) == 17 + len(announced)
    assert all(path.startswith("/fp8ext/v1/") for path in DOCUMENT["paths"])


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_described_and_guarded(name: str) -> None:
    operation = OPERATIONS[name]
    assert operation["summary"]
    assert "401" in operation["responses"]
    assert operation["security"] == [{"fp8extAdminKey": []}]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_refusal_is_a_problem_document(name: str) -> None:
    refusals = {
        status: response
        for status, response in OPERATIONS[name]["responses"].items()
        if not status.startswith("2")
    }
    for status, response in refusals.items():
        assert list(response["content"]) == ["application/problem+json"], status
        assert response["content"]["application/problem+json"]["schema"]["title"] == "Problem", status
