# SPDX-License-Identifier: Apache-2.0
"""Starts and stops a real server in a process of its own."""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import httpx

from vllm_fp8ext.environment import ADMIN_KEY
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.launch import command, environment, stock_command
from vllm_fp8ext.signals import held_back

MODEL = "model"
"""Name under which every server here serves its model."""
SMALL = (
    *("--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager"),
    *("--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(64 << 20)),
)
"""vLLM's options for the tiny model: a quick start and little memory."""
_STOP_SECONDS = 20
_WRONG = re.compile(r"\b[A-Z]\w*(?:Error|Exception): |\bCRITICAL\b")
"""Lines of a log that tell why a process ends."""


def serve_options(pairs: Sequence[str]) -> list[str]:
    """Options of `vllm serve` that were given as words without dashes, `max-model-len=1024` or `enforce-eager`."""
    return [word for pair in pairs for word in f"--{pair}".split("=", 1)]


class Server:
    """`fp8ext serve` on a free port of this machine, with its log in a file. `stock`: vLLM's own server with the routes of
    its dev mode and without any plugin, for comparisons. `key`: the admin key, by default a random one."""

    popen: ClassVar[Callable[..., "subprocess.Popen[Any]"]] = subprocess.Popen
    """Starts the process: tests set a quicker one."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        settings: dict[str, Any] | None = None,
        arguments: Sequence[str] = (),
        variables: dict[str, str] | None = None,
        stock: bool = False,
        key: str | None = None,
    ) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = key or secrets.token_urlsafe(16)
        self.log = log
        base_env = {**os.environ, **(variables or {})}
        here = ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL, *arguments]
        if stock:
            env = {**base_env, "VLLM_PLUGINS": "", "VLLM_SERVER_DEV_MODE": "1"}
            line = stock_command(str(model), here)
        else:
            env, _ = environment({**base_env, ADMIN_KEY: self.key})
            settings_options = ["--additional-config", json.dumps({"fp8ext": settings})] if settings else []
            line = command(str(model), [*here, *settings_options])
        with contextlib.ExitStack() as started:
            with held_back(), log.open("wb") as file:
                self.process = type(self).popen(
                    line, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
                started.callback(self.stop)
            started.pop_all()

    def wait(self, seconds: float = 300) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: it ended, or took too long; with the first errors and the end of its log.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with code {self.process.returncode}:\n{self.what_went_wrong()}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2, trust_env=False).is_success:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the server did not answer within {seconds:g} s:\n{self.what_went_wrong()}")

    def client(self) -> Client:
        """A client of the weight-update routes; past any proxy, which could not reach this machine's own address."""
        return Client(self.url, self.key, transport=httpx.HTTPTransport())

    def what_went_wrong(self) -> str:
        """Return what the log first tells of why a process ends, and its last lines.

        Engines end before what started them.
        """
        lines = self.log.read_text(errors="replace").splitlines()
        named = dict.fromkeys(line for line in lines if _WRONG.search(line))
        return "\n".join([*list(named)[:5], "…", self.tail()])

    def tail(self, lines: int = 25) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the server and everything that it started."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
