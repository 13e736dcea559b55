# SPDX-License-Identifier: Apache-2.0
"""The site has every page, and every link of a page leads to a place on it. `make site` builds it, and checks anchors too."""

import posixpath
import re
from pathlib import Path
from types import ModuleType

import pytest
from program_modules import module_of

PROJECT = Path(__file__).resolve().parent.parent
PAGES = sorted(f"docs/{page.name}" for page in (PROJECT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    """Return the hook of MkDocs, which needs MkDocs only when it is called by it."""
    return module_of("scripts/site_pages.py")


def test_every_page_is_in_the_navigation_once(site_pages: ModuleType) -> None:
    named = re.findall(r"^ +- (\S+\.md)$", (PROJECT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [site_pages.place(page) for page in (*PAGES, *site_pages.PROJECT_PAGES)]
    assert sorted(named) == sorted(pages)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_places_on_the_site(site_pages: ModuleType, page: str) -> None:
    places = {site_pages.place(f"docs/{path.name}") for path in (PROJECT / "docs").rglob("*")}
    places |= {f"images/{path.name}" for path in (PROJECT / "docs" / "images").iterdir()}
    places |= set(site_pages.linked().values())
    text = site_pages.FENCE.sub("", site_pages.moved(page, (PROJECT / page).read_text()))
    links = [link.partition("#")[0] for link in site_pages.LINK.findall(text)]
    here = [posixpath.normpath(link) for link in links if link and not re.match(r"[a-z]+:", link)]
    assert set(here) <= places


def test_links_that_leave_the_pages_are_moved(site_pages: ModuleType) -> None:
    text = "[a](../CHANGELOG.md#added) [b](../examples) [c](moe.md#speed) [d](https://a.b/c)\n```\n[e](../README.md)\n```\n"
    moved = (
        "[a](project/changelog.md#added) [b](files/examples/index.md) [c](moe.md#speed) [d](https://a.b/c)\n"
    )
    assert site_pages.moved("docs/numerics.md", text) == moved + "```\n[e](../README.md)\n```\n"
    assert site_pages.moved("README.md", "[a](docs/moe.md#speed)") == "[a](../moe.md#speed)"


def test_anchors_are_made_as_github_makes_them(site_pages: ModuleType) -> None:
    assert site_pages.github_slug("Few tokens: the decode GEMM", "-") == "few-tokens-the-decode-gemm"
    assert site_pages.github_slug("vLLM's `ipc`", "-") == "vllms-ipc"


def test_what_builds_the_site_is_pinned() -> None:
    lines = (PROJECT / "requirements" / "site.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert any(pin.startswith("mkdocs-material==") for pin in pins)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[\w.]+", pin) for pin in pins)
