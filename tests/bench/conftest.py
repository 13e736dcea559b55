# SPDX-License-Identifier: Apache-2.0
"""The scripts of `benchmarks/` as modules."""

from types import ModuleType

import pytest
from program_modules import module_of


def script(name: str) -> ModuleType:
    """One of them, not run."""
    return module_of(f"benchmarks/{name}.py")


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
def scale_page() -> ModuleType:
    return script("scale_page")


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
