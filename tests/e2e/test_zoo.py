# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family through the whole row: started, updated, compared with a cold start, refused, rolled back.

`make test` has none of them: all run by `pytest -m full tests/e2e/test_zoo.py`, or as a page by `scripts/model-zoo`.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # as programs import these

from zoo_models import KINDS, ZOO

from .scenarios import SECONDS, run_scenario
from .vision import has_torchvision

pytestmark = pytest.mark.timeout(SECONDS + 60)

Rows = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The row of a family, each in a process of its own when it is first asked for."""

    @functools.cache
    def seen(name: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(name)
        vision = ZOO[name].needs_torchvision
        found: dict[str, Any] = run_scenario("zoo_scenario.py", folder, name, vision=vision)
        row: dict[str, Any] = found[name] | {"log": (folder / "log").read_text(errors="replace")}
        return row

    return seen


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_a_family_passes_the_whole_row(rows: Rows, name: str) -> None:
    family = ZOO[name]
    if family.needs_torchvision and not has_torchvision():
        pytest.skip("vLLM reads this family only with torchvision")
    if family.needs_gpu:
        pytest.skip(family.needs_gpu)
    row = rows(name)
    if family.refused is not None:
        assert row["error"]
        assert family.refused in row["log"]  # a process of the engine says it
        return
    assert "error" not in row, row["error"]
    failed = [fact for fact, holds in row["facts"].items() if holds is not True]
    assert not failed


def test_each_kind_has_families() -> None:
    assert {family.kind for family in ZOO.values()} == set(KINDS)
    assert all(name == family.name for name, family in ZOO.items())
