# SPDX-License-Identifier: Apache-2.0
"""`scripts/test --again` forgives tests that fail once, and no others."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = """
[tool.pytest.ini_options]
testpaths = ["tests"]
markers = ["alone", "gpu", "multigpu", "full"]
"""
TESTS = """
import pathlib, pytest

def test_passes(): ...

@pytest.mark.alone
@pytest.mark.parametrize("name", ["a b", "c, [d]"])
def test_fails(name):
    before = pathlib.Path(__file__).with_name(name)
    seen = before.exists()
    before.touch()
    assert seen and not ALWAYS
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts" / "test")
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "tests" / "e2e").mkdir(parents=True)
    (tmp_path / "tests" / "e2e" / "test_served.py").write_text("def test_is_served(): ...\n")
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize(
    ("always", "options", "code", "told"),
    [
        (False, ["--again"], 0, "a defect of these tests:\ntests/test_one.py::test_fails[a b]\n"),
        (False, [], 1, "2 failed"),
        (True, ["--again"], 1, "2 failed, and run again alone"),
    ],
    ids=["once", "not again", "always"],
)
def test_what_failed_runs_again_alone(
    project: Path, always: bool, options: list[str], code: int, told: str
) -> None:
    (project / "tests" / "test_one.py").write_text(TESTS.replace("ALWAYS", str(always)))
    line = [sys.executable, "-P", "scripts/test", *options]
    environment = os.environ | {"VENV": sys.prefix}
    done = subprocess.run(line, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert told in done.stdout
