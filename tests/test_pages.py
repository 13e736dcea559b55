# SPDX-License-Identifier: Apache-2.0
"""Pages are written in short sentences, held by counting their words.

`python tests/test_pages.py` prints the words of a sentence on each page.
"""

import re
import statistics
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
PAGES = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").glob("*.md")])
MOST_WORDS = 18.0
"""Words of a sentence, on average."""


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's paragraphs and list items, without code, tables and headings."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = ["" if re.match(r"\s*(\||#|!\[)", line) else line for line in text.splitlines()]
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(each.split())) for each in paragraphs]
    result = [part for each in plain for part in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*(\[])", each)]
    return [part for part in result if len(part.split()) > 2 and "·" not in part]


def average(page: Path) -> float:
    """Return the mean number of words of a page's sentences."""
    return statistics.mean(len(sentence.split()) for sentence in sentences(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    assert average(page) <= MOST_WORDS


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 120


def test_sentences_are_counted() -> None:
    text = "# A title\n\nOne two three. Four `five six` seven [eight nine](x.md) ten.\n\n| a | b |\n\n- one two three four\n"
    assert [len(sentence.split()) for sentence in sentences(text)] == [3, 7, 5]


if __name__ == "__main__":
    for page in PAGES:
        print(f"{average(page):5.1f} {page.relative_to(PROJECT)}")
