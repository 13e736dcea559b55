# SPDX-License-Identifier: Apache-2.0
"""The scripts of `benchmarks/` as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """One of them, not run."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def routing() -> ModuleType:
    return script("routing")


@pytest.fixture(scope="module")
def experts_page() -> ModuleType:
    return script("experts_page")


@pytest.fixture(scope="module")
def models_page() -> ModuleType:
    return script("models_page")


@pytest.fixture(scope="module")
def kv_page() -> ModuleType:
    return script("kv_page")


@pytest.fixture(scope="module")
def performance_page() -> ModuleType:
    return script("performance_page")


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return script("pictures")


@pytest.fixture(scope="module")
def add_run() -> ModuleType:
    return script("add_run")


@pytest.fixture(scope="module")
def layer_sweep() -> ModuleType:
    return script("layer_sweep")


@pytest.fixture(scope="module")
def features_script() -> ModuleType:
    return script("features")
