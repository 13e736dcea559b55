# SPDX-License-Identifier: Apache-2.0
"""What a type checker in strict mode sees of both clients."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

PROJECT = Path(__file__).resolve().parents[3]
RIGHT = """
from pathlib import Path
from typing import Any, assert_type

import httpx
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import AsyncClient, AsyncReplicas, Client, Replicas

def blocking(client: Client, replicas: Replicas) -> None:
    assert_type(client.weights(), schema.Weights)
    assert_type(client.manifest(), dict[str, Any])
    assert_type(client.open(version="v", running="abort"), schema.Update)
    assert_type(client.put_chunk("u", 0, b"x"), schema.Update)
    assert_type(client.rollback("wait", wait_seconds=1.0), schema.Committed)
    assert_type(client.push(Path("x"), version="v"), schema.Update)
    assert_type(replicas.push("x", id="u"), dict[str, schema.Update])
    with client as same:
        assert_type(same, Client)

async def awaited(client: AsyncClient, replicas: AsyncReplicas) -> None:
    assert_type(await client.weights(), schema.Weights)
    assert_type(await client.push(Path("x"), checksum=False), schema.Update)
    assert_type(await replicas.push("x"), dict[str, schema.Update])
    async with client as same:
        assert_type(same, AsyncClient)
"""
WRONG = {
    'client.open(running="never")': "arg-type",
    "client.push()": "call-arg",
    "client.push(1)": "arg-type",
    'client.push("x", versoin="v")': "call-arg",
    'client.update("u").states': "attr-defined",
    "client.commit(1)": "arg-type",
}


def checked(program: str, folder: Path) -> str:
    file = folder / "program.py"
    file.write_text(program)
    line = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"]
    line += [
        "--config-file",
        str(PROJECT / "pyproject.toml"),
        "--cache-dir",
        str(folder / "cache"),
        str(file),
    ]
    done = subprocess.run(line, capture_output=True, text=True, cwd=PROJECT)
    return done.stdout + done.stderr


@pytest.mark.full
def test_signatures_are_told_and_mistakes_are_found(tmp_path: Path) -> None:
    assert checked(RIGHT, tmp_path) == ""
    lines = "".join(f"    {line}\n" for line in WRONG)
    program = f"from vllm_fp8ext.serve.client import Client\ndef wrong(client: Client) -> None:\n{lines}"
    matching = [line for line in checked(program, tmp_path).splitlines() if "error:" in line]
    assert [line.rsplit("[")[-1].rstrip("]") for line in matching] == list(WRONG.values()), matching
