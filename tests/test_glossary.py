# SPDX-License-Identifier: Apache-2.0
"""The glossary defines words that the code uses, and says where."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = PROJECT / "vllm_fp8ext"
ROW = re.compile(r"^\| (?P<term>[^|]+?) \| (?P<meaning>[^|]+?) \| `(?P<place>[\w.]+)` \|$", re.MULTILINE)
TERMS = [
    (row["term"], row["meaning"], row["place"])
    for row in ROW.finditer((PROJECT / "docs" / "glossary.md").read_text())
]
MOST_WORDS = 18


@cache
def code() -> str:
    """Every source of the package, in words: names and text, small letters."""
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    return re.sub(r"[\W_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower()


def defines(file: Path, name: str) -> bool:
    """Whether a module defines this name."""
    for node in ast.parse(file.read_text()).body:
        targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
        names = {getattr(target, "id", None) for target in targets} | {getattr(node, "name", None)}
        if name in names:
            return True
    return False


@pytest.mark.parametrize(
    ("term", "place"), [(term, place) for term, _, place in TERMS], ids=lambda value: value
)
def test_a_term_occurs_in_the_code_where_it_is_said_to_begin(term: str, place: str) -> None:
    assert re.search(rf"\b{term}\b", code())
    *module, name = place.split(".")
    file = PACKAGE.joinpath(*module).with_suffix(".py")
    assert file.is_file(), place
    assert defines(file, name), place


@pytest.mark.parametrize(
    ("term", "meaning"), [(term, meaning) for term, meaning, _ in TERMS], ids=[term for term, *_ in TERMS]
)
def test_meanings_are_short_sentences(term: str, meaning: str) -> None:
    for sentence in re.split(r"(?<=[.:]) ", meaning):
        assert len(sentence.split()) <= MOST_WORDS, (term, sentence)


def test_terms_are_in_order_and_every_row_is_read() -> None:
    names = [term for term, *_ in TERMS]
    assert names == sorted(set(names))
    text = (PROJECT / "docs" / "glossary.md").read_text()
    assert len(names) == sum(line.startswith("| ") for line in text.splitlines()) - 1 >= 25


def test_the_glossary_is_found() -> None:
    assert "(docs/glossary.md)" in (PROJECT / "README.md").read_text()
    assert "(glossary.md)" in (PROJECT / "docs" / "README.md").read_text()
