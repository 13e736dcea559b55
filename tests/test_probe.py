# SPDX-License-Identifier: Apache-2.0
"""The probe on a small package that looks like vLLM, and on the installed one."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fp8ext.compat.interfaces import Feature, Interface, features
from vllm_fp8ext.compat.probe import find_missing

SOURCES = {
    "__init__.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from vllm.engine import Engine
        else:
            def __getattr__(name): ...
        """,
    "base.py": """
        from dataclasses import dataclass
        class Base:
            limit: int = 3
            def __init__(self, config, *, rank=0):
                self.config = config
                with open("x") as self.log:
                    pass
            def step(self, batch): ...
        @dataclass
        class Fields:
            first: int
        """,
    "engine.py": """
        from typing import TYPE_CHECKING
        import vllm.base as base_module
        from torch import Tensor
        from vllm.base import Base as Renamed
        from .base import Fields
        if TYPE_CHECKING:
            from vllm.base import OnlyForTypes
        try:
            import fast
        except ImportError:
            fast = None
        _CACHE: dict = {}
        class Local(Renamed):
            pass
        class Engine(Local):
            default, other = 1, 2
            def start(this):
                this.queue: list = []
            async def stop(self, mode, *, clear=True): ...
        class Dotted(base_module.Base): ...
        class Outside(Tensor):
            def own(self): ...
        class More(Fields):
            second: int = 0
        class Circle(Circle): ...
        def add(request, /, wave=0, *, fast=False): ...
        """,
    "facade/__init__.py": "from .inner import *\nfrom ..engine import Engine, add as plus\n",
    "facade/inner.py": "def hidden(x): ...\n",
    "broken.py": "def (:\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a small package `vllm`."""
    for name, source in SOURCES.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = source.splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        path.write_text("\n".join(line[indent:] for line in lines) + "\n")
    return tmp_path


def needed(module: str, name: str, *parameters: str) -> Interface:
    return Interface(module=module, name=name, parameters=parameters, why="run this test")


@pytest.mark.parametrize(
    "interface",
    [
        needed("vllm.engine", "add", "request", "wave", "fast"),
        needed("vllm.engine", "Engine"),
        needed("vllm.engine", "_CACHE"),
        needed("vllm.engine", "fast"),
        needed("vllm.engine", "Engine.stop", "mode", "clear"),
        needed("vllm.engine", "Engine.default"),
        needed("vllm.engine", "Engine.other"),
        needed("vllm.engine", "Engine.queue"),
        needed("vllm.engine", "Engine.limit"),
        needed("vllm.engine", "Engine.config"),
        needed("vllm.engine", "Engine.log"),
        needed("vllm.engine", "Engine.step", "batch"),
        needed("vllm.engine", "Engine", "config", "rank"),
        needed("vllm.engine", "Dotted.step", "batch"),
        needed("vllm.engine", "Outside.own"),
        needed("vllm.engine", "More", "first", "second"),
        needed("vllm.engine", "Tensor"),
        needed("vllm.facade", "plus", "request"),
        needed("vllm.facade", "Engine.step"),
        needed("vllm.facade", "hidden", "x"),
        needed("vllm", "Engine.queue"),
        needed("vllm", "base"),
        needed("vllm.facade", "inner"),
        needed("vllm.engine", ""),
    ],
    ids=lambda interface: f"{interface.module}.{interface.name}",
)
def test_present_names_are_found(root: Path, interface: Interface) -> None:
    assert find_missing([interface], root) == []


@pytest.mark.parametrize(
    ("interface", "missing"),
    [
        (needed("vllm.engine", "gone"), "gone is missing"),
        (needed("vllm.engine", "Engine.gone"), "Engine.gone is missing"),
        (needed("vllm.engine", "add", "request", "a", "b"), "add does not take a, b"),
        (needed("vllm.engine", "Engine.step", "a"), "Engine.step does not take a"),
        (needed("vllm.engine", "Engine", "a"), "Engine does not take a"),
        (needed("vllm.engine", "More", "third"), "More does not take third"),
        (needed("vllm.engine", "_CACHE", "a"), "_CACHE is no longer a function or class"),
        (needed("vllm.engine", "OnlyForTypes"), "OnlyForTypes is missing"),
        (needed("vllm.engine", "Outside.gone"), "Outside.gone is missing"),
        (needed("vllm.engine", "Circle.gone"), "Circle.gone is missing"),
        (needed("vllm.gone", "Engine"), "the module is missing, and Engine with it"),
        (needed("vllm.gone", ""), "the module is missing"),
        (needed("vllm.facade", "gone"), "gone is missing"),
        (needed("vllm.broken", "Engine"), "the module cannot be parsed"),
    ],
    ids=lambda value: value.name if isinstance(value, Interface) else "",
)
def test_missing_names_are_told(root: Path, interface: Interface, missing: str) -> None:
    [line] = find_missing([interface], root)
    assert line.startswith(f"{interface.module}: {missing}")
    assert line.endswith("; needed to run this test")


def test_every_missing_name_has_its_line(root: Path) -> None:
    wanted = [needed("vllm.engine", name) for name in ("a", "Engine", "b")]
    assert len(find_missing(wanted, root)) == 2


@pytest.mark.parametrize("feature", features().values(), ids=lambda feature: feature.name)
def test_nothing_is_missing_from_the_installed_vllm(feature: Feature) -> None:
    assert find_missing(feature.interfaces) == []


def test_the_probe_imports_neither_vllm_nor_torch() -> None:
    program = """
import sys
from vllm_fp8ext.compat.interfaces import features
from vllm_fp8ext.compat.probe import find_missing
find_missing(features()["json_responses"].interfaces)
sys.exit(", ".join({"vllm", "torch"} & set(sys.modules)) or None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
