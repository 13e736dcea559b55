# SPDX-License-Identifier: Apache-2.0
"""Docstrings begin with a sentence that names its subject, held by reading the sources."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
ROOMS = (
    *("kernels", "loadtest", "serve", "serve/client"),
    *(
        f"vllm_fp8ext/{name}"
        for name in ("", "bench", "calibrate", "checkpoints", "compat", "demo", "layers")
    ),
    *(f"vllm_fp8ext/{name}" for name in ("memory_plan", "trainer", "update")),
    *(f"vllm_fp8ext/update/{name}" for name in ("contract", "engine", "transports", "worker")),
    *(f"vllm_fp8ext/compat/{name}" for name in ("graphs", "speed", "update", "warmup")),
)
HELD = (
    *("kernels", "loadtest", "serve", "serve/client"),
    *("vllm_fp8ext/layers", "vllm_fp8ext/compat", "vllm_fp8ext/update/transports"),
    "vllm_fp8ext/update/worker",
    *("vllm_fp8ext/", "vllm_fp8ext/update", "vllm_fp8ext/update/contract", "vllm_fp8ext/update/engine"),
    *(f"vllm_fp8ext/compat/{name}" for name in ("graphs", "speed", "update", "warmup")),
    *(
        f"vllm_fp8ext/{name}"
        for name in ("bench", "calibrate", "checkpoints", "demo", "memory_plan", "trainer")
    ),
)
"""Rooms whose docstrings hold the rule."""
NOT_YET = tuple(room for room in ROOMS if room not in HELD)
"""Rooms whose docstrings still begin otherwise: none is added here, each is taken out when its files hold the rule."""
NO_SUBJECT = {"Of", "That", "Those", "By", "Whether", "Which", "What", "To", "Where"}
"""First words after which no sentence has a subject or is an imperative."""
MOST_WORDS = 15
PRIVATE_NAMES = {"found", "twin", "lies_well", "recite", "recital", "sing", "sung", "errand", "chores"}
"""Names that say too little, or that this project alone would know; none is given to anything."""


@cache
def docstrings(file: Path) -> tuple[tuple[int, str], ...]:
    """The line and the text of every docstring of a file, of its constants too."""
    return tuple(_texts(ast.parse(file.read_text())))


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def fault(text: str) -> str | None:
    """What is wrong with the first sentence of a docstring, or None."""
    first = re.split(r"(?<=[.!?])\s|:\s|;\s|\n\s*\n", " ".join(text.split()) + " ")[0]
    words = first.split()
    if words and words[0].strip("`'\",") in NO_SUBJECT:
        return f"begins with {words[0]!r}"
    return f"{len(words)} words" if len(words) > MOST_WORDS else None


def files(room: str) -> list[Path]:
    """The files of a room; rooms within it are rooms of their own."""
    deeper = {PROJECT / other for other in ROOMS if other != room}
    result = (PROJECT / room).glob("*.py") if room.endswith("/") else (PROJECT / room).rglob("*.py")
    return sorted(
        file
        for file in result
        if file.resolve() == file and not deeper & {*file.parents} - {*(PROJECT / room).parents}
    )


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in NOT_YET])
def test_docstrings_name_their_subject_first(room: str) -> None:
    wrong = [
        f"{file.relative_to(PROJECT)}:{line}: {why}: {text.strip()[:80]}"
        for file in files(room)
        for line, text in docstrings(file)
        if (why := fault(text))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Of what says which weights these are, nothing may be said otherwise.", "begins with 'Of'"),
        ("Raise if a repeated `open` describes other weights than the update it names.", None),
        ("Compiled kernels kept in the cache.", None),
        ("Words " * 16, "16 words"),
        (
            "Return bytes: whatever follows a colon, however long it is, belongs to the second half of what is said.",
            None,
        ),
    ],
)
def test_first_sentences_are_judged(text: str, expected: str | None) -> None:
    assert fault(text) == expected


def test_every_file_is_in_a_room() -> None:
    folders = [PROJECT / name for name in ("kernels", "serve", "loadtest", "vllm_fp8ext")]
    package = {file for folder in folders for file in folder.rglob("*.py") if file.resolve() == file}
    assert package == {file for room in ROOMS for file in files(room)}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Every file of the package, parsed."""
    for room in ROOMS:
        for file in files(room):
            yield file, ast.parse(file.read_text())


def test_a_public_class_name_has_one_meaning() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(str(file.relative_to(PROJECT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_names_are_those_that_readers_know() -> None:
    named = {
        f"{file.relative_to(PROJECT)}:{node.lineno}: {name}"
        for file, tree in sources()
        for node in ast.walk(tree)
        if (name := _given_name(node)) and name.strip("_").lower() in PRIVATE_NAMES
    }
    assert named == set()


def _given_name(node: ast.AST) -> str | None:
    """The name that a node gives to a variable, an argument, a function or a class, or None."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    return None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("found = 1", True),
        ("def f(found): ...", True),
        ("class Errand: ...", True),
        ("raise E(found=1)", False),
    ],
)
def test_names_are_judged(text: str, named: bool) -> None:
    names = {_given_name(node) for node in ast.walk(ast.parse(text))} - {None}
    assert bool({str(name).lower() for name in names} & PRIVATE_NAMES) == named
