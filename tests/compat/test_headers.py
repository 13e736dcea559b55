# SPDX-License-Identifier: Apache-2.0
"""Files that touch vLLM describe themselves as data."""

import ast
import functools
from pathlib import Path

import pytest

from vllm_fp8ext.compat.interfaces import (
    CORE,
    MACHINERY,
    PACKAGE,
    Feature,
    Interface,
    constants_of,
    features,
    headers,
)
from vllm_fp8ext.config import Settings

COMPAT = sorted(
    file
    for file in (PACKAGE / "compat").rglob("*.py")
    if file.name not in ("__init__.py", *MACHINERY) or file.parent.name in ("graphs", "speed", "update")
)
FILES = [file for file in COMPAT if file.name != "__init__.py"]
TEXTS = ("FEATURE", "WHY", "GAIN", "UPSTREAM", "REMOVE_WHEN")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE / "compat")))
def test_each_file_says_what_it_is_for(file: Path) -> None:
    values = constants_of(ast.parse(file.read_text()))
    assert {*TEXTS, "REPLACES", "USES"} <= values.keys()
    assert all(isinstance(values[name], str) and values[name] for name in TEXTS)
    assert isinstance(values["REPLACES"], tuple)
    assert isinstance(values["USES"], dict)
    for text in (*values["REPLACES"], *(text for texts in values["USES"].values() for text in texts)):
        assert Interface.of(text, "try it").module.startswith("vllm."), text
    assert values["UPSTREAM"] == "none known" or values["UPSTREAM"].startswith("https://github.com/")


def test_core_needs_no_other_feature() -> None:
    assert features()[CORE].needs == frozenset()


@pytest.mark.parametrize("feature", features().values(), ids=lambda feature: feature.name)
def test_features_need_features_that_exist_and_not_themselves(feature: Feature) -> None:
    needed, new = set(), feature.needs
    while new - needed:
        needed |= new
        new = frozenset().union(*(features()[name].needs for name in needed))
    assert feature.name not in needed


def test_switches_are_settings() -> None:
    for feature in features().values():
        if feature.switch is not None:
            path, off = feature.switch
            assert functools.reduce(getattr, path.split("."), Settings()) != off, feature.name


def test_what_a_file_wraps_it_says() -> None:
    """Names in calls of `wrap` are those of `REPLACES`."""
    for header in headers():
        tree = ast.parse((PACKAGE / header.file).read_text())
        wrapped = {
            node.args[1].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "wrap"
            and isinstance(node.args[1], ast.Constant)
        }
        assert wrapped <= {interface.name.rpartition(".")[2] for interface in header.replaces}, header.file


def test_imports_of_vllm_are_names_that_a_feature_leans_on() -> None:
    names = {(interface.module, interface.name) for interface in features()["flat_logprobs"].interfaces}
    assert ("vllm.v1.engine.logprobs", "LogprobsProcessor") in names
    assert ("vllm.v1.engine", "logprobs") in names


def test_members_of_imported_names_are_names_that_a_feature_leans_on() -> None:
    """A vLLM without one switches the feature off; read in a request, it would be answered by an error."""
    names = {(interface.module, interface.name) for interface in features()["flat_logprobs"].interfaces}
    assert ("vllm.sampling_params", "RequestOutputKind.FINAL_ONLY") in names  # a class and its member
    names = {(interface.module, interface.name) for interface in features()["weight_versions"].interfaces}
    protocol = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
    assert (protocol, "GenerateTextResponse") in names  # a module and its class


@pytest.mark.parametrize("text", ["vllm.engine", "vllm.engine:add(", "vllm.engine:add()", "vllm engine:add"])
def test_a_name_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected module:name"):
        Interface.of(text, "try it")


def test_the_page_tells_every_feature() -> None:
    """`scripts/check-vllm 0.31.0 0.32.0 0.33.0 --write docs/compatibility.md` writes it."""
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert list(rows) == list(features())
    for name, feature in features().items():
        if name != CORE:
            first = feature.headers[0]
            assert f"| {first.why} | {first.gain} |" in rows[name]
            assert rows[name].endswith(f"| {first.remove_when} |")
