# SPDX-License-Identifier: Apache-2.0
"""The command lines of benchmarks."""

import argparse
from importlib import import_module

import pytest

from vllm_fp8ext.bench.options import CommandLine, case_of, json_object
from vllm_fp8ext.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("kernels", {"all", "4096 8192"}),
        ("rollout", {"Qwen3-8B", "24.0", "5", "all", "auto"}),
        ("kv", {"Qwen3-8B", "15.0", "0.9", "2", "all"}),
        ("updates", {"files http", "blockfp8", "keep", "0", "3"}),
        ("kv_accuracy", {"layer", "8", "32", "all"}),
    ],
)
def test_help_tells_defaults(command: str, told: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"vllm_fp8ext.bench.{command}").main(["--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert {default for default in told if f"(default: {default})" in said} == told
    for nothing in ("inf", "None", "False", "[]", "[", "("):
        assert f"(default: {nothing}" not in said


def test_help_keeps_the_text() -> None:
    parser = CommandLine("rollout", "What it is.\n\n    as it is")
    parser.add_argument("--much", type=int, default=3, help="50 %% of it")
    said = parser.format_help()
    assert "\n    as it is\n" in said
    assert "50 % of it (default: 3)" in said
    assert "write the cases here, as JSON\n" in said


def test_a_case() -> None:
    assert case_of("8x512x256") == (8, 512, 256)
    assert case_of("1x1x1") == (1, 1, 1)


@pytest.mark.parametrize("text", ["", "8x512", "8x512x256x1", "8xax256", "8*512*256"])
def test_what_is_no_case(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        case_of(text)
    assert str(caught.value) == f"--cases: expected REQUESTSxINPUTxOUTPUT such as 8x512x256, found {text!r}"


@pytest.mark.parametrize(
    ("text", "least"), [("0x1x1", 1), ("1x0x1", 1), ("1x1x0", 1), ("1x1x1", 2), ("-1x1x1", 1)]
)
def test_a_case_with_too_little(text: str, least: int) -> None:
    with pytest.raises(ConfigError) as caught:
        case_of(text, least_output=least)
    assert f"1 request, 1 input token and {least} of output at least, found {text!r}" in str(caught.value)


def test_an_object_of_json() -> None:
    assert json_object('{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null"])
def test_what_is_no_object_of_json(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        json_object(text)
    assert str(caught.value) == f"expected a JSON object, found {text!r}"


def test_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    line = CommandLine("rollout", None)
    line.add_choice("--some", ("a", "b", "c"), ["a", "b"], "of letters")
    line.add_choice("--one", ("a", "b"), "b", "of fewer", nargs=None)
    said = " ".join(line.format_help().split())
    assert "--some NAME [NAME ...] of letters: a, b, c (default: a b)" in said
    assert "--one NAME of fewer: a, b (default: b)" in said
    given = line.parse_args(["--some", "c", "a"])
    assert (given.some, given.one) == (["c", "a"], "b")
    with pytest.raises(SystemExit):
        line.parse_args(["--one", "c"])
    assert "invalid choice: 'c'" in capsys.readouterr().err
