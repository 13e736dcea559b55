# SPDX-License-Identifier: Apache-2.0
"""Changes of weights while requests run: through this project's routes, or through those of stock vLLM's dev mode.

They are made by a process of their own, so that reading and sending gigabytes does not hold up the clock of the requests.
"""

import contextlib
import dataclasses
import itertools
import json
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent.subprocess
import httpx

from vllm_fp8ext.environment import ADMIN_KEY
from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.loadtest.records import UpdateRecord, short
from vllm_fp8ext.loadtest.vllm_dev_routes import VllmDevRoutes
from vllm_fp8ext.serve.client import Client

READY = "ready"
"""First answer of a process that can push."""
GIVE_UP_SECONDS = 10.0
"""For giving up an update that is under way when a run ends."""


class Fp8extUpdates:
    """Alternates checkpoints through `/fp8ext/v1`: on this machine, or on the server's with `files`.

    Raises:
        ValueError: a checkpoint that is not on this machine, and not `files`.
        UpdateError: the server refuses the key, or has no such routes.
        httpx.HTTPError: the server can't be reached.
    """

    def __init__(
        self, url: str, key: str, checkpoints: list[Path], *, running: str = "keep", files: bool = False
    ) -> None:
        missing = [str(path) for path in checkpoints if not files and not _is_there(path)]
        if missing:
            raise ValueError(
                f"expected checkpoints on this machine, found no *.safetensors in {', '.join(missing)}"
            )
        self._client = Client(url, key, transport=httpx.HTTPTransport())  # past any proxy, as streams go
        self._client.weights()  # a wrong key or host is told at the start of a run, not at its first update
        self._turn: Iterator[Path] = itertools.cycle(checkpoints)
        self._running, self._files = running, files
        self._number = itertools.count(1)

    def push(self, step: int | None = None) -> UpdateRecord:
        """The next checkpoint, from opening the update to the answer of its commit; never raises for what goes wrong."""
        checkpoint = next(self._turn)
        update = UpdateRecord(f"{checkpoint.name}-{next(self._number)}", time.monotonic(), step=step)
        try:
            self._push(checkpoint, update)
        except Exception as error:
            _failed(update, error)
        return update

    def _push(self, checkpoint: Path, update: UpdateRecord) -> None:
        running: Any = self._running
        id = uuid.uuid4().hex
        try:
            if self._files:
                self._client.open(id=id, version=update.version, running=running)
                self._client.files(id, checkpoint)
                self._client.prepare(id)
            else:
                self._client.push(checkpoint, id=id, version=update.version, running=running, commit=False)
            update.commit_sent = time.monotonic()
            done = self._client.commit(id)
        except BaseException:
            with contextlib.suppress(UpdateError, httpx.HTTPError):
                self._client.abandon(id)
            raise
        update.committed = time.monotonic()
        update.epoch = (done.result or {}).get("epoch")
        update.pause_seconds = done.seconds.get("pause")


class StockUpdates:
    """`reload_weights` of vLLM's dev mode (`VLLM_SERVER_DEV_MODE=1`), with generation paused around it as its documentation
    asks. Stock vLLM has no epochs, and tells nobody which weights sampled a token."""

    def __init__(self, url: str, checkpoints: list[Path]) -> None:
        self._routes = VllmDevRoutes(url)
        self._turn: Iterator[Path] = itertools.cycle(checkpoints)
        self._number = itertools.count(1)

    def push(self, step: int | None = None) -> UpdateRecord:
        """Pause, reload, reset the prefix cache, resume; never raises for what goes wrong."""
        checkpoint = next(self._turn)
        update = UpdateRecord(f"{checkpoint.name}-{next(self._number)}", time.monotonic(), step=step)
        update.commit_sent = update.began
        try:
            with self._routes.paused():
                arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
                self._routes.call("/collective_rpc", json=arguments)
            update.committed = time.monotonic()
        except Exception as error:
            _failed(update, error)
        return update


def _is_there(checkpoint: Path) -> bool:
    return checkpoint.is_file() or any(checkpoint.glob("*.safetensors"))


def _failed(update: UpdateRecord, error: Exception) -> None:
    """Write down that an update has failed now, for whatever reason: the run goes on, and its report says so."""
    update.committed = time.monotonic()
    update.commit_sent = update.commit_sent or update.committed
    update.error = error.kind if isinstance(error, UpdateError) else type(error).__name__
    update.said = short(str(error))


class Pusher:
    """Pushes from a process of its own, which one greenlet at a time talks to.

    `options`: `through` (`fp8ext` or `stock`), `url`, `checkpoints`, and for `fp8ext` `key`, `running` and `files`.

    Raises:
        ConfigError: what is known at once: no key or a wrong one, a checkpoint that is not there, or a server without these
            routes.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        line = [sys.executable, "-m", "vllm_fp8ext.loadtest.weight_updates"]
        pipe = gevent.subprocess.PIPE
        self._process = gevent.subprocess.Popen(line, stdin=pipe, stdout=pipe)
        self._pushes = itertools.count(1)
        answer = self._ask(options)
        if answer != READY:
            self.close()
            raise ConfigError(answer)

    def push(self, step: int | None = None) -> UpdateRecord:
        """Change the weights once. An update that fails, even by the end of the process, is told by its `error`."""
        update = UpdateRecord(f"update-{next(self._pushes)}", time.monotonic(), step=step)
        try:
            return UpdateRecord(**self._ask({"step": step}))
        except Exception as error:
            _failed(update, error)
            return update

    def close(self) -> None:
        """End the process. It gives up an update that is under way, which would keep others out."""
        self._process.terminate()
        try:
            self._process.wait(GIVE_UP_SECONDS)
        except gevent.subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, question: Any) -> Any:
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that pushes weights has ended: see what it printed")
        return json.loads(answer)


def main() -> None:
    """Do what the lines on the standard input ask for. The first answer is `READY`, or why there is nothing to be done."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as for Ctrl-C: the update is given up
    with contextlib.suppress(KeyboardInterrupt):
        _answer()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself


def _answer() -> None:
    options = json.loads(sys.stdin.readline())
    try:
        pusher = _changer(options)
    except (UpdateError, httpx.HTTPError, ValueError) as error:
        hint = "" if options["key"] else f" ({ADMIN_KEY} is not set, and no --key-file given)"
        print(
            json.dumps(f"--update-every: {error}{hint if isinstance(error, UpdateError) else ''}"), flush=True
        )
        return
    print(json.dumps(READY), flush=True)
    for line in sys.stdin:
        update = pusher.push(json.loads(line)["step"])
        print(json.dumps(dataclasses.asdict(update)), flush=True)


def _changer(options: dict[str, Any]) -> Fp8extUpdates | StockUpdates:
    url, checkpoints = options["url"], [Path(path) for path in options["checkpoints"]]
    if options["through"] == "stock":
        return StockUpdates(url, checkpoints)
    return Fp8extUpdates(url, options["key"], checkpoints, running=options["running"], files=options["files"])


if __name__ == "__main__":
    main()
