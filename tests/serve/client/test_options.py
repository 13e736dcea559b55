# SPDX-License-Identifier: Apache-2.0
"""The options of a push: one definition behind the keywords of all clients."""

import ast
import inspect
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.serve.client import (
    AsyncClient,
    AsyncReplicas,
    Client,
    ClientPushOptions,
    PushOptions,
    Replicas,
    ReplicasPushOptions,
)

DOCS = Path(__file__).resolve().parents[3] / "docs" / "client.md"
KINDS = [ClientPushOptions, ReplicasPushOptions]


@pytest.mark.parametrize(
    ("client", "options"),
    [
        (Client, ClientPushOptions),
        (AsyncClient, ClientPushOptions),
        (Replicas, ReplicasPushOptions),
        (AsyncReplicas, ReplicasPushOptions),
    ],
)
def test_keywords_are_the_fields(client: Any, options: type[PushOptions]) -> None:
    parameters = inspect.signature(client.push).parameters.values()
    keywords = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert keywords == {field.name: field.default for field in fields(options)}


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes: expected at least 1, found 0"),
        ({"chunks_in_flight": 0}, "chunks_in_flight: expected at least 1, found 0"),
        ({"transport": "pigeon"}, "transport: expected http, .*files.*, found 'pigeon'"),
        ({"running": "never"}, "running: .* found 'never'"),
        ({"base_epoch": -1}, "base_epoch: .* found -1"),
        ({"wait_seconds": 0.0}, "wait_seconds: .* found 0.0"),
        ({"id": "a/b"}, "id: .* found 'a/b'"),
        ({"version": ""}, "version: .* found ''"),
    ],
)
def test_a_value_that_no_push_can_have(options: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(**wrong)


def test_tensors_of_this_process_go_to_one_server() -> None:
    assert ClientPushOptions(transport="ipc").transport == "ipc"
    with pytest.raises(ValueError, match=r"transport: expected http, nccl, files.*, found 'ipc'"):
        ReplicasPushOptions(transport="ipc")


def test_a_number_is_a_label() -> None:
    assert PushOptions(version=7).opening()["version"] == "7"


def test_options_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        PushOptions().fp8 = True  # type: ignore[misc]


@pytest.mark.parametrize("options", KINDS)
def test_every_field_is_described_in_code_and_documentation(options: type[PushOptions]) -> None:
    tree = ast.parse(Path(inspect.getfile(options)).read_text())
    described = {
        field.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    page = DOCS.read_text()
    for field in fields(options):
        assert field.name in described
        assert f"`{field.name}`" in page
