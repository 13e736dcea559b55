# SPDX-License-Identifier: Apache-2.0
"""A vLLM that lacks names: the installed one, in which they are called otherwise."""

import importlib.util
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

IMPORTED = {"JSONResponse": "vllm/entrypoints/openai/completion/api_router.py"}
"""Names of other packages, by the file of vLLM that imports them."""


def vllm_without(folder: Path, names: Collection[str]) -> Path:
    """Write under `folder` a package `vllm` that has another name in place of each of these. Files without them are links."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    everywhere = [name for name in names if name not in IMPORTED]
    seen: set[str] = set()
    for place, _, files in os.walk(package):
        target = folder / "vllm" / Path(place).relative_to(package)
        target.mkdir(parents=True, exist_ok=True)
        if target.name == "__pycache__":
            continue
        for file in files:
            source = Path(place) / file
            here = [name for name in names if IMPORTED.get(name) == f"vllm/{source.relative_to(package)}"]
            text = source.read_text() if file.endswith(".py") else ""
            changed = _renamed(text, here, everywhere, seen)
            if changed != text:
                (target / file).write_text(changed)
            else:
                (target / file).symlink_to(source)
                _link_bytecode(source, target)
    assert seen == set(names), f"expected names of vLLM, found none of {set(names) - seen}"
    return folder


def _renamed(text: str, imported: Collection[str], everywhere: Collection[str], seen: set[str]) -> str:
    for name in (*imported, *everywhere):
        if name in text:
            text, count = re.subn(rf"\b{name}\b", f"{name}Gone", text)
            seen |= {name} if count else set()
    for name in imported:
        text = re.sub(
            rf"^(from .* import .*)\b{name}Gone\b", rf"\1{name} as {name}Gone", text, flags=re.MULTILINE
        )
    return text


def _link_bytecode(source: Path, target: Path) -> None:
    """So that an unchanged file is not compiled anew."""
    compiled = Path(importlib.util.cache_from_source(str(source)))
    if compiled.is_file():
        (target / "__pycache__").mkdir(exist_ok=True)
        (target / "__pycache__" / compiled.name).symlink_to(compiled)


def remove(folder: Path) -> None:
    """Take the package away; its files are some thousand links."""
    shutil.rmtree(folder / "vllm")
