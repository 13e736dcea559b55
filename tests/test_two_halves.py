# SPDX-License-Identifier: Apache-2.0
"""`scripts/test --again` forgives tests that fail once, and no others; `--minutes` is when it ends."""

import os
import shutil
import subprocess
import sys
import time
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

LONG_TESTS = """
import time, pytest

pytestmark = pytest.mark.full

@pytest.mark.alone
def test_of_one_half(): time.sleep(600)

def test_of_the_other(): time.sleep(600)
"""
MINUTES = 2


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


@pytest.mark.full
def test_a_limited_time_is_kept(project: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", project / "tests" / "conftest.py")
    (project / "tests" / "test_long.py").write_text(LONG_TESTS)
    line = [sys.executable, "-P", "scripts/test", "--rest", "--minutes", str(MINUTES)]
    started = time.monotonic()
    done = subprocess.run(
        line, cwd=project, env=os.environ | {"VENV": sys.prefix}, capture_output=True, text=True
    )
    assert time.monotonic() - started < 60 * MINUTES
    assert done.returncode == 0, done.stdout + done.stderr
    assert "those behind them did not run" in done.stdout


@pytest.mark.full
def test_another_turn_begins_with_another_file(project: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", project / "tests" / "conftest.py")
    for name in "abc":
        (project / "tests" / f"test_{name}.py").write_text("def test_one(): ...\ndef test_two(): ...\n")
    (project / "tests" / "test_b.py").write_text(TESTS)
    line = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not alone", "--collect-only", "--turn=6"]
    told = subprocess.run(line, cwd=project, capture_output=True, text=True).stdout
    tests = [name.removeprefix("tests/") for name in told.split() if "::" in name]
    assert tests == [
        "test_b.py::test_passes",
        "test_c.py::test_one",
        "test_c.py::test_two",
        "e2e/test_served.py::test_is_served",
        "test_a.py::test_one",
        "test_a.py::test_two",
    ]
