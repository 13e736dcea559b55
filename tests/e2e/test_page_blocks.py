# SPDX-License-Identifier: Apache-2.0
"""The blocks of the pages, run: snippets in Python, commands of shells, and the servers that pages start.

Addresses, keys and folders of the pages become those of a test's server. Names that a snippet takes from a trainer are set
before it. `page_blocks.NOT_RUN` says which blocks are not run, and why.
"""

import ast
import asyncio
import contextlib
import copy
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from page_blocks import PROJECT, Block, blocks
from safetensors.torch import load_file
from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import SMALL, Server
from vllm_fp8ext.environment import ADMIN_KEY, URL
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import Client, Group
from vllm_fp8ext.trainer.convert import convert

from .ask import complete

KEY = "change-me"
CHAINED = {"docs/http-api.md"}
"""Pages whose shell blocks are one script."""
AFTER_START = "from vllm_fp8ext.kv_trainer"
"""Beginning of a snippet that needs a server of its own page: one with an FP8 KV cache."""
RUN = {block.text: block for block in reversed(blocks()) if block.reason is None}.values()
SHELL = [
    pytest.param(block, id=str(block), marks=pytest.mark.full if block.text.startswith("fp8ext") else ())
    for block in RUN
    if block.is_shell and not block.serves and block.page not in (*CHAINED, "docs/plan.md")
]
SERVERS = [block for block in RUN if block.serves]
PYTHON = [block for block in RUN if block.language == "python" and not block.text.startswith(AFTER_START)]


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """The late checkpoint as transformers holds it."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(LATE, dtype=torch.bfloat16)
    return model


@pytest.fixture
def here(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that pages name; the folder of the servers has them, too."""
    for checkpoint in (
        *(tmp_path / "checkpoints" / name for name in ("step-100", "step-101")),
        folder / "step-100",
    ):
        shutil.copytree(LATE, checkpoint, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def placed(text: str, folder: Path, single: Server, pair: Server) -> str:
    """Return a block's text with the addresses, keys and folders of servers that are there."""
    if "rollout-0" in text:  # keys of two servers differ: here their addresses carry them
        text = text.replace(f', "{KEY}")', ")")
    for n, server in enumerate((single, pair)):
        text = text.replace(f"rollout-{n}:8000", f"x:{server.key}@127.0.0.1:{server.port}")
    text = re.sub(r"(?<=[\"' ])/(?:checkpoints|models)(?=[/\"'])", str(folder), text)
    return text.replace("http://rollout:8000", single.url).replace(f'"{KEY}"', f'"{single.key}"')


def shell(script: str, server: Server, **more: str) -> str:
    """Run commands and return what they print; the first one that fails ends them."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{script}"],
        env={**os.environ, "PATH": path, URL: server.url, ADMIN_KEY: server.key, **more},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, script + done.stdout[-2000:] + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", SHELL)
def test_commands(block: Block, single: Server, pair: Server, folder: Path, here: Path) -> None:
    script = placed(block.text, folder, single, pair)
    if "rollout-0" in block.text:
        script = f"unset {ADMIN_KEY}\n{script}"
    (here / "admin.key").write_text(single.key)
    with single.client() as client:
        if "3f1c…" in script:
            script = script.replace("3f1c…", client.push(LATE, commit=False).id)
        elif "fp8ext abandon" in script:
            client.push(LATE, version="late")
            client.open()
    shell(script, single)


@pytest.mark.parametrize("page", CHAINED)
def test_commands_of_a_page_as_one_script(page: str, single: Server, folder: Path, here: Path) -> None:
    script = "\n".join(block.text for block in blocks() if block.page == page and block.language == "bash")
    checkpoint = folder / "documented"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "model.safetensors").write_bytes((LATE / "model.safetensors").read_bytes())
    shell(script, single, URL=single.url, CHECKPOINT=str(checkpoint))


@contextlib.contextmanager
def names_of(block: Block, model: nn.Module, server: Server) -> Iterator[dict[str, Any]]:
    """Yield what a snippet takes from the trainer around it."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(server.url, server.key))
        model = copy.deepcopy(model)
        if "full_tensor()" in block.text:
            init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            stack.callback(destroy_process_group)
            fully_shard(model)
        logprobs = -torch.rand(2, 6)
        spans = [[{"version": "a", "start": 0, "end": 6, "epoch": 1, "instance": "b"}]] * 2
        weights = load_file(LATE / "model.safetensors")
        history: list[dict[str, float]] = [{"mismatch/kl_k3": 0.1, "mismatch/kl_k1": 0.1}]
        names = {
            "Client": Client,
            "client": client,
            "model": model,
            "rank": 0,
            "step": 101,
            "steps": 1,
            "train": nn.Module.train,
            "torch": torch,
            "convert": convert,
            "state": {f"model._fsdp_wrapped_module.{name[6:]}": each for name, each in weights.items()},
            "parts": [dict([each]) for each in weights.items()],
            "trainer_logprobs": logprobs,
            "server_logprobs": logprobs - 0.01,
            "per_token_loss": -logprobs,
            "mask": torch.ones_like(logprobs),
            "spans": spans,
            "wandb": SimpleNamespace(log=history.append),
            "history": history,
            "tokens": torch.arange(3, 11)[None],
            "labels": torch.arange(3, 11)[None],
        }
        if "error.details" in block.text:
            names["error"] = UpdateError("interrupted", "lost", id=client.push(LATE, commit=False).id)
        if "client.abandon" in block.text:
            client.open()
        if "group" in block.text and "Group()" not in block.text:
            names["group"] = stack.enter_context(Group())
        yield names


def execute(text: str, names: dict[str, Any]) -> None:
    """Run a snippet, on an event loop if it awaits something."""
    code = compile(text, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_snippets(
    block: Block,
    single: Server,
    pair: Server,
    folder: Path,
    here: Path,
    trained: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(URL, single.url)
    monkeypatch.setenv(ADMIN_KEY, single.key)
    with single.client() as client:
        epoch = client.weights().epoch
        with names_of(block, trained, single) as names:
            if "rollout-0" in block.text:
                monkeypatch.delenv(ADMIN_KEY)
            execute(placed(block.text, folder, single, pair), names)
        if ".push(" in block.text or ".commit(" in block.text:
            assert client.weights().epoch == epoch + 1
        assert client.weights().update is None


def test_answers_have_what_pages_show(single: Server) -> None:
    """Of a completion, and of a commit."""
    with single.client() as client:
        result = client.push(LATE, version="late").result
    [choice] = complete(single, "123+456=")["choices"]
    compared = 0
    for block in blocks():
        if block.text.startswith('"weight_versions"'):
            shown = json.loads(f"{{{block.text}}}")["weight_versions"]
            assert {frozenset(span) for span in shown} == {frozenset(choice["weight_versions"][0])}
            compared += 1
        elif block.language == "json" and '"pause_seconds"' in block.text:
            assert result is not None
            assert json.loads(block.text).keys() == result.keys()
            compared += 1
    assert compared >= 3


def test_a_refusal_begins_with_the_name_that_the_page_of_problems_has(single: Server) -> None:
    command = [sys.executable, "-P", "-m", "vllm_fp8ext.cli", "status", "--url", single.url, "--key", "wrong"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    kind = done.stderr.removeprefix("fp8ext: ").partition(":")[0]
    assert f"\n| `{kind}` |" in (PROJECT / "docs" / "problems.md").read_text()


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("block", SERVERS, ids=str)
def test_servers(block: Block, folder: Path, here: Path, trained: nn.Module) -> None:
    """Each command that serves, on the tiny model and a free port, and what its page goes on with."""
    port, url = _free(), ""
    url = f"http://127.0.0.1:{port}"
    small = () if "--max-model-len" in block.text else SMALL
    options = " ".join((*small, "--host", "127.0.0.1", "--port", str(port)))
    script = re.sub(r"serve (MODEL|FOLDER|Qwen/Qwen3-8B)", f"serve {EARLY}", block.text)
    script = re.sub(r"(serve \S+)", rf"\1 {options}", script)
    script = re.sub(r'"/checkpoints"', f'"{folder}"', script.replace("http://127.0.0.1:8000", url))
    script = re.sub(r"^(pip install .*|export FP8EXT_ADMIN_KEY=\.\.\.)$", "", script, flags=re.MULTILINE)
    script = re.sub(r"^# once .*$", f"until curl -fsS {url}/health; do sleep 1; done", script, flags=re.M)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "PATH": path, URL: url, ADMIN_KEY: KEY}
    goes_on = "/health" in script
    with (here / "log").open("w+") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"set -euo pipefail\n{script}"],
            env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            if goes_on:
                assert process.wait(400) == 0, (here / "log").read_text()[-3000:]
            _wait(process, url, here / "log")
            text = (here / "log").read_text()
            routes = httpx.get(f"{url}/fp8ext/v1/weights", headers={"Authorization": f"Bearer {KEY}"})
            assert routes.is_success == ("FP8EXT" in script or "fp8ext serve" in script)
            if goes_on:
                assert '"text":"9750"' in text or "late" in text
            for snippet in blocks():
                if snippet.page == block.page and snippet.text.startswith(AFTER_START):
                    with Client(url, KEY) as client:
                        execute(snippet.text, {"client": client, "model": trained, "prompts": [[3, 4, 5, 6]]})
                        assert client.weights().epoch == 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def _free() -> int:
    from vllm_fp8ext.demo.server import _free_port

    return _free_port()


def _wait(process: "subprocess.Popen[Any]", url: str, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert not process.poll(), log.read_text()[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])
