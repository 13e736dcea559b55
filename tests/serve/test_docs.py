# SPDX-License-Identifier: Apache-2.0
"""The documentation against the code: what a user can set, meet or click is there."""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from vllm_fp8ext import environment
from vllm_fp8ext.config import Settings
from vllm_fp8ext.kernel_settings import KernelSettings
from vllm_fp8ext.kv_settings import KvScaleSettings, Policy
from vllm_fp8ext.serve.schema import PREFIX

PROJECT = Path(__file__).resolve().parent.parent.parent
HTTP_API = PROJECT / "docs" / "http-api.md"
PROBLEMS = HTTP_API.with_name("problems.md")
KV_CACHE = HTTP_API.with_name("kv-cache.md")
CLIENT = PROJECT / "docs" / "client.md"
PAGES = sorted(
    page
    for folder in (PROJECT, *(PROJECT / name for name in ("docs", "examples", "benchmarks")))
    for page in (folder.glob("*.md") if folder == PROJECT else folder.rglob("*.md"))
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@cache
def sources() -> dict[Path, ast.Module]:
    """Every Python file of the two rooms that raise problems, each once."""
    files = [path for folder in ("vllm_fp8ext", "serve") for path in (PROJECT / folder).rglob("*.py")]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files if path.resolve() == path}


def problem_kinds(*, client: bool) -> set[str]:
    """First arguments of `UpdateError`, values of `"kind"` in dictionaries, and of names called `kind`.

    Those of the client are not in any answer of a server.
    """
    folder = PROJECT / "serve" / "client"
    trees = [tree for path, tree in sources().items() if (folder in path.parents) == client]
    return {kind for tree in trees for node in ast.walk(tree) for kind in _kinds(node)}


def _kinds(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call(func=ast.Name(id="UpdateError"), args=[first, *_]):
            yield from _strings(first)
        case ast.Dict():
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "kind":
                    yield from _strings(value)
        case ast.Assign(targets=[ast.Name(id="kind")], value=value):
            yield from _strings(value)


def _strings(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=other):
            yield from _strings(body)
            yield from _strings(other)


def table(heading: str, page: Path = HTTP_API) -> set[str]:
    """The names in the first column of a section's table."""
    section = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def problem_entries() -> list[tuple[str, str, str, str]]:
    """Return type, status, meaning and remedy of each row of the page of problems."""
    cells = re.findall(
        r"^\| `([a-z0-9-]+)` \| (\d{3}) \| ([^|]*?) ?\| ([^|]*?) ?\|",
        PROBLEMS.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return [(kind, status, meaning, remedy) for kind, status, meaning, remedy in cells]


def defaults(page: Path = HTTP_API) -> dict[str, str]:
    """The second column of the table of settings."""
    section = page.read_text(encoding="utf-8").partition("\n## Settings\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section, re.MULTILINE))


def headings(page: Path) -> set[str]:
    """Anchors of a page, made as GitHub makes them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_pages_and_kinds_are_found() -> None:
    assert {"README.md", "CHANGELOG.md", "http-api.md", "numerics.md"} <= {page.name for page in PAGES}
    assert {"no-key", "invalid-tensors", "non-finite", "wrong-dtype"} <= problem_kinds(client=False)
    assert "http" in problem_kinds(client=True)


def test_every_setting_is_named_with_its_default() -> None:
    assert table("Settings") == set(Settings.model_fields)
    result = Settings().model_dump(mode="json")
    for name, default in defaults().items():
        assert Settings.parse({"fp8ext": {name: _json(default)}}).model_dump(mode="json") == result, name


def test_every_setting_of_the_kv_cache_is_named_with_its_default() -> None:
    assert table("Settings", KV_CACHE) == set(KvScaleSettings.model_fields)
    settings = KvScaleSettings(policy="calibrate")
    told = {name: _json(default) for name, default in defaults(KV_CACHE).items()}
    assert told.keys() == KvScaleSettings.model_fields.keys() - {"policy"}
    assert told == settings.model_dump(exclude={"policy"})


def test_every_policy_is_named() -> None:
    assert table("Policies", KV_CACHE) == set(get_args(Policy))


def _json(text: str) -> object:
    words = {"null": None, "false": False, "true": True}
    return words[text] if text in words else ast.literal_eval(text)


def test_every_setting_of_kernels_is_told_with_its_default() -> None:
    text = HTTP_API.with_name("performance-method.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)[^|]*\| ([^|]+?) \|", text.partition("\n## Kernel choice\n")[2], re.MULTILINE
    )
    assert {name for name, _ in rows} == set(KernelSettings.model_fields)
    told = {name: _json(default.strip("`")) for name, default in rows if default in ("`true`", "`false`")}
    assert told.items() <= KernelSettings().model_dump().items()
    assert len(told) >= 6


def test_every_environment_variable_is_named() -> None:
    names = {value for name, value in vars(environment).items() if name.isupper()}
    variables = names - {environment.DEFAULT_URL}
    assert variables
    assert variables <= table("Environment variables")


def test_every_problem_has_one_entry_and_nothing_else_has() -> None:
    entries = problem_entries()
    assert sorted(problem_kinds(client=False)) == sorted(kind for kind, *_ in entries)
    assert problem_kinds(client=True) == table("Errors", CLIENT)


def test_every_problem_says_what_it_means_and_what_to_do() -> None:
    entries = problem_entries()
    assert [kind for kind, _, meaning, remedy in entries if len(meaning) < 5 or len(remedy) < 10] == []
    remedies = [remedy for *_, remedy in entries]
    assert len(set(remedies)) == len(remedies)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_shell_blocks_are_shell(page: Path) -> None:
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
            assert done.returncode == 0, block + done.stderr


def test_every_route_has_an_example() -> None:
    """In a block that is run, so that a test can run them all as one script."""
    document = json.loads((PROJECT / "docs" / "openapi.json").read_text(encoding="utf-8"))
    routes = {
        f"{method.upper()} {re.sub(r'{[^}]+}', '*', path.removeprefix(PREFIX))}"
        for path, methods in document["paths"].items()
        for method in methods
    }
    blocks = BLOCK.findall(HTTP_API.read_text(encoding="utf-8"))
    script = "".join(block for language, block in blocks if language == "bash").replace("\\\n", " ")
    called = set()
    for options, path in re.findall(r'curl ([^|)]*?)"\$API([^"]*)"', script):
        method = "PUT" if " -T " in options else (re.findall(r"-X (\w+)", options) or ["GET"])[0]
        called.add(f"{method} {re.sub(r'[$][A-Z]+|(?<=chunks/)[0-9]+', '*', path)}")
    # of other processes, of memory on GPUs, or of an FP8 KV cache: the server of this script has none
    others = {"POST /updates/*/handles", "POST /updates/*/receive", "POST /sleep", "POST /wake"}
    others.add("GET /weights/kv-scales")
    assert called | others == routes
    for route in others:
        assert f"| `{route.replace('*', '{id}')}` |" in HTTP_API.read_text(encoding="utf-8")


def test_situations_name_tests_that_exist() -> None:
    """Each row of the table of situations ends with the test that holds it."""
    page = (PROJECT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = re.findall(r"`([\w/]+\.py)::(\w+)` \|$", page, re.MULTILINE)
    assert len(rows) > 80
    tests = PROJECT / "tests"
    assert [row for row in rows if f"def {row[1]}(" not in (tests / row[0]).read_text(encoding="utf-8")] == []
