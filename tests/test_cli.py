# SPDX-License-Identifier: Apache-2.0
"""`fp8ext push`: its options become the client's arguments."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.cli import cli
from vllm_fp8ext.environment import ADMIN_KEY, DEFAULT_URL, URL
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.serve import client as client_module
from vllm_fp8ext.serve.schema import Update

DONE = Update.model_validate(
    {
        "id": "u1",
        "state": "committed",
        "version": "v",
        "running": "keep",
        "base_epoch": None,
        "opened_at": 0.0,
    }
    | {"tensors_required": 0, "tensors_missing": 0, "missing": [], "bytes": 0, "chunks": {}, "problems": []}
    | {"seconds": {"pause": 0.5}, "quantization_error": None, "result": {"epoch": 3, "version": "v"}}
)


class Recorded:
    """Stands for both clients; keeps what they were made and called with."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, Any]] = []
        self.pushed: list[dict[str, Any]] = []

    def __call__(self, target: Any, key: Any) -> "Recorded":
        self.made.append((target, key))
        return self

    def __enter__(self) -> "Recorded":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, id: str) -> Any:
        self.looked_up = id

    def push(self, checkpoint: Path, **options: Any) -> Any:
        options.pop("progress")(1, 2)
        self.pushed.append({"checkpoint": checkpoint, **options})
        target = self.made[-1][0]
        return DONE if isinstance(target, str) else dict.fromkeys(target, DONE)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr(client_module, "Client", recorded)
    monkeypatch.setattr(client_module, "Replicas", recorded)
    monkeypatch.delenv(URL, raising=False)
    monkeypatch.setenv(ADMIN_KEY, "secret")
    return recorded


def push(tmp_path: Path, *arguments: str) -> Any:
    result = CliRunner().invoke(cli, ["push", str(tmp_path), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_options_are_handed_on(recorded: Recorded, tmp_path: Path) -> None:
    arguments = ["--running", "wait", "--wait-seconds", "5", "--no-checksum", "--resume", "u1"]
    arguments += ["--partial", "--fp8", "--instance", "0a1b", "--expert-layout", "out_in"]
    push(tmp_path, "--key", "k", "--version", "v", "--base-epoch", "2", *arguments)
    assert recorded.made == [(DEFAULT_URL, "k")]
    assert recorded.looked_up == "u1"
    assert recorded.pushed == [
        {
            "checkpoint": tmp_path,
            "version": "v",
            "base_epoch": 2,
            "instance": "0a1b",
            "running": "wait",
            "wait_seconds": 5.0,
            "checksum": False,
            "id": "u1",
            "partial": True,
            "fp8": True,
            "expert_layout": "out_in",
        }
    ]


def test_without_options(recorded: Recorded, tmp_path: Path) -> None:
    result = push(tmp_path)
    [pushed] = recorded.pushed
    assert (pushed["running"], pushed["checksum"], pushed["id"], pushed["wait_seconds"]) == (
        "keep",
        True,
        None,
        None,
    )
    assert "epoch 3 is served" in result.output


@pytest.mark.parametrize("by_variable", [True, False])
def test_several_servers(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    urls = ("http://a:1", "http://b:2")
    if by_variable:
        monkeypatch.setenv(URL, " ".join(urls))
    given = [] if by_variable else [word for url in urls for word in ("--url", url)]
    loaded = json.loads(push(tmp_path, "--json", *given).stdout)
    assert recorded.made == [(urls, "secret")]
    assert {url: update["id"] for url, update in loaded.items()} == dict.fromkeys(urls, "u1")


def test_one_server_is_printed_by_itself(recorded: Recorded, tmp_path: Path) -> None:
    loaded = json.loads(push(tmp_path, "--json", "--url", "http://a:1").stdout)
    assert (recorded.made, loaded["id"]) == ([("http://a:1", "secret")], "u1")


def test_a_key_is_asked_for_before_anything_is_sent(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADMIN_KEY)
    (tmp_path / "empty.key").write_text("\n")
    for line, why in (
        ([], "none of them was given"),
        (["--key-file", str(tmp_path / "empty.key")], "is empty"),
    ):
        with pytest.raises(ConfigError, match=f"--key-file FILE, --key KEY or {ADMIN_KEY}: .*{why}"):
            CliRunner().invoke(cli, ["push", str(tmp_path), *line], catch_exceptions=False)
    assert recorded.made == []


def test_passwords_of_urls_are_keys_and_are_not_shown(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = ("http://x:first@a:1", "http://x:second@b:2")
    for given in (urls, urls[:1]):
        result = push(tmp_path, *(word for url in given for word in ("--url", url)))
        assert not re.search("first|second", result.output)
    assert recorded.made == [(urls, None), (urls[0], None)]
    monkeypatch.delenv(ADMIN_KEY)
    push(tmp_path, "--url", urls[0])
    push(tmp_path, "--url", urls[0], "--key", "first")
    assert recorded.made[2:] == [(urls[0], None), (urls[0], "first")]
    with pytest.raises(ConfigError, match="none of them was given"):
        push(tmp_path, "--url", urls[0], "--url", "http://b:2")


def test_seconds_to_wait_go_with_waiting(recorded: Recorded, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["push", str(tmp_path), "--wait-seconds", "5"])
    assert (result.exit_code, recorded.pushed) == (2, [])
    assert "--wait-seconds goes with --running wait, found keep" in result.output


def test_a_life_is_of_one_server(recorded: Recorded, tmp_path: Path) -> None:
    urls = ["--url", "http://a", "--url", "http://b"]
    result = CliRunner().invoke(cli, ["push", str(tmp_path), "--instance", "0a1b", *urls])
    assert (result.exit_code, recorded.pushed) == (2, [])
    assert "--instance is of one server, found 2 URLs" in result.output


def test_a_partial_update_says_what_it_is_of(recorded: Recorded, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["push", str(tmp_path), "--partial"])
    assert (result.exit_code, recorded.pushed) == (2, [])
    assert "--partial goes with --base-epoch, found none" in result.output


def test_the_load_test_lists_its_options() -> None:
    result = CliRunner().invoke(cli, ["bench", "load", "--help"])
    assert result.exit_code == 0
    assert {"--users", "--vocabulary", "--slo", "--scrape-every"} <= set(result.output.split())


def run(script: str, *line: str) -> subprocess.CompletedProcess[str]:
    """The console script in a process of its own, after a line of Python."""
    program = f"import sys; {script}; from vllm_fp8ext.cli import main; main()"
    command = [sys.executable, "-P", "-c", program, *line]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("torch", ["digest", "."]),
        ("torch", ["demo"]),
        ("torch", ["bench", "update", "--help"]),
        ("vllm", ["serve", "model"]),
        ("locust", ["bench", "load"]),
        ("hdrh", ["bench", "load"]),
    ],
)
def test_a_package_that_is_not_there_is_named(package: str, line: list[str]) -> None:
    done = run(f"sys.modules[{package!r}] = None", *line)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{package}" in done.stderr
    assert "pip install" in done.stderr


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        done = run(
            "import vllm_fp8ext.serve.client.clients as c; c.RETRIES = 0",
            "status",
            "--url",
            url,
            "--key",
            "k",
        )
    assert done.returncode == 1
    assert done.stderr.startswith(f"fp8ext: {url}/fp8ext/v1/weights: ")


def test_what_becomes_of_running_requests_is_checked(recorded: Recorded, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["push", str(tmp_path), "--running", "never"])
    assert (result.exit_code, recorded.pushed) == (2, [])


def test_options_of_vllm_come_after_the_model() -> None:
    result = CliRunner().invoke(cli, ["serve", "--port", "8001", "model"])
    assert result.exit_code == 2
    assert "expected MODEL before the options, found --port" in result.output


@pytest.mark.parametrize("model", ["/missing/model", "../missing"])
def test_a_folder_that_is_not_there_is_not_served(model: str) -> None:
    result = CliRunner().invoke(cli, ["serve", model])
    assert result.exit_code == 2
    assert f"there is no {model}" in result.output
    assert ".key" not in result.output


@pytest.mark.parametrize("option", ["-cc.cudagraph_mode=NONE", "-O.cudagraph_mode=NONE", "-dph"])
def test_an_option_of_vllm_that_holds_an_h_asks_for_no_help(
    monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    served: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _, line, env: served.append(line))
    monkeypatch.setenv(ADMIN_KEY, "secret")
    result = CliRunner().invoke(cli, ["serve", "model", option, "x"], catch_exceptions=False)
    assert (result.exit_code, result.output) == (0, "")
    assert served[0][-2:] == [option, "x"]
    result = CliRunner().invoke(cli, ["calibrate", ".", option, "x"])
    assert "Missing option '--out'" in result.output


def test_labels_are_no_markup(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labelled = DONE.model_copy(update={"result": {"epoch": 3, "version": "[lr=1e-6] [/x]"}})
    monkeypatch.setattr(recorded, "push", lambda checkpoint, **options: labelled)
    assert "[lr=1e-6] [/x]" in " ".join(push(tmp_path).output.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["status", "--url", "http://127.0.0.1:abc", "--key", "k"], "Invalid port: 'abc'"),
        (["digest", "CHECKPOINT", "--manifest", "FILE"], "expected a server's manifest"),
        (["bench", "report", "FILE"], "expected the report.json of a load test"),
        (["bench", "report", "FILE", "--out", "FOLDER"], "report.json"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, line: list[str], message: str) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    known = {"FILE": str(file), "CHECKPOINT": str(EARLY), "FOLDER": str(tmp_path)}
    done = run("pass", *(known.get(word, word) for word in line))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("fp8ext: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", ["schlüssel".encode(), b"\xff\xfe", b"one\ntwo\n"])
@pytest.mark.parametrize("line", [["status"], ["push", "CHECKPOINT"], ["bench", "load"]], ids=" ".join)
def test_a_file_whose_key_nobody_could_send_is_one_line(
    tmp_path: Path, line: list[str], content: bytes
) -> None:
    file = tmp_path / "admin.key"
    file.write_bytes(content)
    words = [str(EARLY) if word == "CHECKPOINT" else word for word in line]
    result = CliRunner().invoke(cli, [*words, "--key-file", str(file)])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"{file}: expected a key of printable ASCII characters")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ALL_PROXY": "socks5://proxy:1080"}, "needs the package socksio: pip install 'httpx[socks]'"),
        ({"HTTP_PROXY": "http://127.0.0.1:9"}, "through the proxy http://127.0.0.1:9 (of HTTP_PROXY)"),
    ],
)
def test_a_proxy_that_does_not_work_is_one_line(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    block = "sys.modules['socksio'] = None"
    done = run(block, "status", "--url", "http://rollout:8000", "--key", "k")
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_asks_something() -> None:
    result = CliRunner().invoke(cli, ["demo", "--problems", "0"])
    assert result.exit_code == 2
    assert "0 is not in the range 1<=x<=10000" in result.output
