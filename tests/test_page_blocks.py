# SPDX-License-Identifier: Apache-2.0
"""What pages tell to type is valid: commands are parsed by the programs themselves, data by what reads it, calls are bound.

`tests/e2e/test_page_blocks.py` runs the blocks. `page_blocks.NOT_RUN` says which it does not run, and why.
"""

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from page_blocks import NOT_RUN, PAGES, PROJECT, Block, blocks, commands, spans
from pydantic import BaseModel, TypeAdapter, ValidationError

from vllm_fp8ext import environment
from vllm_fp8ext.bench.command import MEASUREMENTS
from vllm_fp8ext.cli import cli
from vllm_fp8ext.config import Settings
from vllm_fp8ext.loadtest import options as load_options
from vllm_fp8ext.serve import client, schema
from vllm_fp8ext.serve.launch import require_valid
from vllm_fp8ext.update.contract.manifest import Manifest

SHELL = [block for block in blocks() if block.is_shell]
DATA = [block for block in blocks() if block.language in ("json", "http")]
NOT_RUN_PYTHON = [block for block in blocks() if block.language == "python" and block.reason]
DRAWINGS = ("Qwen3-8B on H200", "trainer or disk", "        chunks, files")
"""Beginnings of blocks without a language that nobody types: two drawings, and an output that is compared elsewhere."""
UNCHECKED = {"cd", "export", "[", "python3", "grep"}
"""What a shell has, and what reads JSON between two calls."""
STAND_INS = {
    "PART": "kv_history",
    "mine": "deep_gemm",
    "…": "1",
    "...": "1",
    "FAMILY": "qwen3",
    "VERSION": "0.33.0",
}
"""What parsers take for words that stand for others."""
HOLDS = {
    "client": client.Client,
    "weights": client.Client,
    "replicas": client.Replicas,
}
"""Classes of names that snippets do not import."""


class _Parsed(Exception):
    """Arguments were parsed: the program would begin now."""


@pytest.fixture(scope="module")
def vllm_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    return parser


@pytest.fixture
def parse(
    vllm_parser: argparse.ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Raises for words that the program they begin with does not take. `partly`: required ones may be missing."""
    real_parse, real_invoke = argparse.ArgumentParser.parse_args, click.Command.invoke

    def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        real_parse(parser, args, namespace)
        raise _Parsed

    def error(parser: argparse.ArgumentParser, message: str) -> None:
        raise ValueError(message)

    def invoke(command: click.Command, context: click.Context) -> Any:
        if command.name in ("serve", "load", *MEASUREMENTS) and not isinstance(command, click.Group):
            return real_invoke(command, context)
        return None

    def served(words: Sequence[str]) -> None:
        real_parse(vllm_parser, ["serve", *words])
        require_valid(words)

    def load_tested(words: Sequence[str]) -> None:
        parser = argparse.ArgumentParser()
        load_options.add(parser)
        for option in ("--users", "--spawn-rate", "--processes"):
            parser.add_argument(option, type=int)
        options = real_parse(parser, list(words))
        load_options.of(options)

    def execve(_: str, arguments: Sequence[str], variables: dict[str, str]) -> None:
        served(arguments[arguments.index("serve") + 1 :])

    def execv(_: str, arguments: Sequence[str]) -> None:
        load_tested(arguments[arguments.index("--traffic") :])

    def check(words: Sequence[str], *, partly: bool = False) -> None:
        program, *rest = [STAND_INS.get(word, word.replace("$CHECKPOINTS", "checkpoints")) for word in words]
        program = program.removeprefix(".venv/bin/")
        try:
            if program == "fp8ext":
                cli.main(rest, "fp8ext", standalone_mode=False)
            elif program == "vllm":
                served(rest[1:])
            elif program == "make":
                subprocess.run(["make", "-n", *rest], cwd=PROJECT, check=True, capture_output=True)
            elif program == "pip":
                assert rest[0] == "install"
                assert set(re.findall(r"^\.\[(.*)\]$", rest[1])) <= {"loadtest", "cuda"}
                assert rest[1].startswith(".") or rest[1] == "httpx[socks]", f"nobody serves {rest[1]}"
            elif program == "benchmarks/h200.sh":
                assert (
                    f"part {STAND_INS.get(rest[1].strip('[]'), rest[1])} " in (PROJECT / program).read_text()
                )
            elif program == "scripts/test":
                assert (PROJECT / rest[0]).exists()
            elif program == "python" and "-m" in rest:
                assert rest[rest.index("-m") + 1] in ("pytest",)
            elif program == "python" or program.startswith("scripts/"):
                script, *arguments = rest if program == "python" else [program, *rest]
                if script == "-c":
                    compile(arguments[0], "-c", "exec")
                elif "ArgumentParser" in (PROJECT / script).read_text():
                    monkeypatch.setattr(sys, "argv", [script, *arguments])
                    runpy.run_path(str(PROJECT / script), run_name="__main__")
                else:
                    assert not arguments, f"{script} takes no arguments"
            elif program == "curl":
                _checked_call(rest)
            else:
                assert program in UNCHECKED, f"{program}: no program that pages have had so far"
        except _Parsed:
            pass
        except (click.UsageError, ValueError) as missing:
            text = f"{type(missing).__name__} {missing}"
            if not partly or not re.search(
                r"Missing|NoArgs|are required|expected (one|at least one) argument", text
            ):
                raise

    for name in ("checkpoints/step-100", "checkpoints/step-101", "checkpoints/late", "stock", "ours"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("MODEL", "CHECKPOINT", "FOLDER"):
        (tmp_path / name).mkdir()
    for name in ("stock/report.json", "ours/report.json", "prompts.jsonl", "admin.key"):
        (tmp_path / name).write_text("key")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(environment.ADMIN_KEY, "key")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(argparse.ArgumentParser, "error", error)
    monkeypatch.setattr(click.Command, "invoke", invoke)
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(os, "execv", execv)
    return check


def _checked_call(words: Sequence[str]) -> None:
    """Check path and body of a call of curl against the description of the API."""
    address = next(word for word in words if word.startswith(("$API", "http")))
    path = (
        "/" + address.partition("/")[2]
        if address.startswith("$API")
        else re.sub(r"^http://[^/]*", "", address)
    )
    if path.startswith("/v1/") or path == "/metrics":
        return
    path = re.sub(r"\$\w+|(?<=chunks/)\d+", "{}", path.removeprefix(schema.PREFIX))
    document = json.loads((PROJECT / "docs" / "openapi.json").read_text())
    known = {
        re.sub(r"{[^}]*}", "{}", name.removeprefix(schema.PREFIX)): each
        for name, each in document["paths"].items()
    }
    method = "put" if "-T" in words else words[words.index("-X") + 1].lower() if "-X" in words else "get"
    assert method in known[path], f"{method} {path}"
    if "-d" in words and "requestBody" in known[path][method]:
        body = known[path][method]["requestBody"]["content"]["application/json"]["schema"]
        reference = (body.get("$ref") or body["anyOf"][0]["$ref"]).rpartition("/")[2]
        text = re.sub(r"(?<=: )\$\w+", "1", words[words.index("-d") + 1])
        TypeAdapter(getattr(schema, reference)).validate_json(text)


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_are_those_of_the_programs(block: Block, parse: Callable[..., None]) -> None:
    named = list(commands(block.text))
    assert named
    for variables, words in named:
        ours = {name for name in variables if name.startswith("FP8EXT_")}
        assert ours <= {value for value in vars(environment).values() if isinstance(value, str)}
        parse(words)


@pytest.mark.parametrize(("page", "text"), spans())
def test_commands_within_sentences_are_those_of_the_programs(
    page: str, text: str, parse: Callable[..., None]
) -> None:
    for _, words in commands(text.replace("{…}", "{}")):
        parse([word for word in words if word != "…"], partly=True)


def test_wrong_commands_are_seen(parse: Callable[..., None]) -> None:
    for wrong in (
        "fp8ext push checkpoints/step-100 --wait-second 3",
        "fp8ext push nowhere",
        "fp8ext serve MODEL --no-such-option",
        'vllm serve MODEL --additional-config \'{"fp8ext": {"stagin": "none"}}\'',
        "fp8ext bench load --slo 'ttft_p99'",
        "fp8ext bench update --no-such-option 3",
        "python benchmarks/upload.py --no-such-option",
        "make nothing",
        "pip install vllm-fp8ext",
        "npm start",
        'curl -X POST "$API/weight"',
    ):
        for _, words in commands(wrong):
            with pytest.raises((Exception, SystemExit)):
                parse(words)


def test_shell_is_split_into_commands() -> None:
    script = 'A=1 b --c \'{"d": 1}\'  # e\nF=$(g "h i" | j)\nif [ -n "$K" ]; then\n  l \\\n    m\nfi\n'
    assert [words for _, words in commands(script)] == [
        ["b", "--c", '{"d": 1}'],
        ["g", "h i"],
        ["j"],
        ["[", "-n", "$K", "]"],
        ["l", "m"],
    ]


@pytest.mark.parametrize("block", DATA, ids=str)
def test_data_are_what_they_are_said_to_be(block: Block) -> None:
    text = block.text.partition("\n\n")[2] if block.language == "http" else block.text
    if text.startswith('"weight_versions"'):
        return  # tests/e2e/test_page_blocks.py compares it with an answer
    whole = re.sub(r"(\w+)…==", lambda cut: cut[1].ljust(86, "A") + "==", text)
    data = json.loads(whole.replace("…", "0000"))
    models = [
        each for each in vars(schema).values() if isinstance(each, type) and issubclass(each, BaseModel)
    ]
    assert any(_is_of(data, model) for model in models) or _is_other(data), block.text


def _is_of(data: dict[str, Any], model: type[BaseModel]) -> bool:
    try:
        model.model_validate_json(json.dumps(data))
    except ValidationError:
        return False
    return data.keys() <= model.model_fields.keys() or model is schema.Problem


def _is_other(data: dict[str, Any]) -> bool:
    """Tell whether it is settings, a manifest, the result of a commit, or an error of vLLM's routes."""
    if "pause_seconds" in data:
        return True  # tests/e2e/test_page_blocks.py compares it with an answer
    if isinstance(data.get("tensors"), dict):
        return Manifest.from_dict(data).as_dict().keys() == data.keys()
    if "error" in data:
        return data.keys() == {"error", "problems", "problem_count"}
    return bool(Settings.parse({"fp8ext": data}))


@pytest.mark.parametrize("block", NOT_RUN_PYTHON, ids=str)
def test_calls_that_are_not_run_bind(block: Block) -> None:
    tree = ast.parse(block.text)
    names: dict[str, Any] = dict(HOLDS)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            names |= {alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _bind(node, names)


def _bind(call: ast.Call, names: dict[str, Any]) -> None:
    """Raise `TypeError` or `AttributeError` if a function that is known here does not take these arguments."""
    match call.func:
        case ast.Name(id=name) if name in names:
            function, first = names[name], []
        case ast.Attribute(value=ast.Name(id=name), attr=method) if name in names:
            function, first = getattr(names[name], method), [None] if isinstance(names[name], type) else []
        case _:
            return
    keywords = {each.arg: None for each in call.keywords if each.arg}
    inspect.signature(function).bind(*first, *call.args, **keywords)


def test_wrong_calls_are_seen() -> None:
    for wrong in ("client.pushh(1)", "client.push(1, verson='2')"):
        call = ast.parse(wrong, mode="eval").body
        assert isinstance(call, ast.Call)
        with pytest.raises((TypeError, AttributeError)):
            _bind(call, HOLDS)


def test_reasons_are_of_one_block_each() -> None:
    for page, start in NOT_RUN:
        assert sum(block.page == page and block.text.startswith(start) for block in blocks()) == 1, (
            page,
            start,
        )


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    assert len(blocks()) > 80
    assert len(PAGES) > 25
    for block in blocks():
        known = block.is_shell or block in DATA or block.language == "python"
        assert known or block.text.startswith(DRAWINGS), str(block)
