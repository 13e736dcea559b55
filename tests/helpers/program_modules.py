# SPDX-License-Identifier: Apache-2.0
"""Programs that are no part of the package, as modules."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[2]


def module_of(path: str) -> ModuleType:
    """Import a program by its path in the project, under its file's name, without running it."""
    file = PROJECT / path
    loader = SourceFileLoader(file.stem, str(file))  # by no suffix: programs of scripts/ have none
    spec = importlib.util.spec_from_file_location(file.stem, file, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
