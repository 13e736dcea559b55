# SPDX-License-Identifier: Apache-2.0
"""Every method that is wrapped on a class of vLLM takes each call that vLLM's sources make of it."""

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python.processes import run

from vllm_fp8ext.compat.interfaces import PACKAGE, headers


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What a process found in which all is wrapped."""
    program = Path(__file__).with_name("installed.py")
    # Triton lies where this process has looked for it
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = run([sys.executable, "-P", str(program)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_wrappers_take_what_vllm_calls_them_with(told: dict[str, Any]) -> None:
    assert told["refused"] == []


def test_every_wrap_of_a_class_is_looked_at(told: dict[str, Any]) -> None:
    """Names in calls of `wrap`, in all files."""
    names = {name.rpartition(".")[2] for name in told["wrapped"]}
    for header in headers():
        for node in ast.walk(ast.parse((PACKAGE / header.file).read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "wrap":
                name = node.args[1]
                replaced = [each.name.rpartition(".")[2] for each in header.replaces]  # of a loop over names
                assert {*([name.value] if isinstance(name, ast.Constant) else replaced)} <= names, header.file
