# SPDX-License-Identifier: Apache-2.0
"""Changes of weights while requests run: through this project's routes, or through those of stock vLLM's dev mode.

They are made by a process of their own, so that reading and sending gigabytes does not hold up the clock of the requests.
"""

import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent.subprocess
import httpx

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.loadtest.records import Update
from vllm_fp8ext.serve.client import Client


class Fp8ext:
    """Alternates checkpoints through `/fp8ext/v1`: folders on this machine, or on the server's with `files`."""

    def __init__(
        self, url: str, key: str, checkpoints: list[Path], *, running: str = "keep", files: bool = False
    ) -> None:
        self._client = Client(url, key)
        self._client.weights()  # a wrong key or host is told at the start of a run, not at its first update
        self._turn: Iterator[Path] = itertools.cycle(checkpoints)
        self._running, self._files = running, files
        self._number = itertools.count(1)

    def push(self, step: int | None = None) -> Update:
        """The next checkpoint, from opening the update to the answer of its commit."""
        checkpoint = next(self._turn)
        update = Update(f"{checkpoint.name}-{next(self._number)}", time.monotonic(), step=step)
        try:
            self._push(checkpoint, update)
        except UpdateError as error:
            update.error = error.kind
            update.commit_sent = update.commit_sent or time.monotonic()
            update.committed = time.monotonic()
        return update

    def _push(self, checkpoint: Path, update: Update) -> None:
        running: Any = self._running
        if self._files:
            id = self._client.open(version=update.version, running=running).id
            try:
                self._client.files(id, checkpoint)
                self._client.prepare(id)
            except UpdateError:
                self._client.abandon(id)
                raise
        else:
            id = self._client.push(checkpoint, version=update.version, running=running, commit=False).id
        update.commit_sent = time.monotonic()
        try:
            done = self._client.commit(id)
        except UpdateError:
            with contextlib.suppress(UpdateError):
                self._client.abandon(id)
            raise
        update.committed = time.monotonic()
        update.epoch = (done.result or {}).get("epoch")
        update.pause_seconds = done.seconds.get("pause")


class Stock:
    """`reload_weights` of vLLM's dev mode (`VLLM_SERVER_DEV_MODE=1`), with generation paused around it as its documentation
    asks. Stock vLLM has no epochs, and tells nobody which weights sampled a token."""

    def __init__(self, url: str, checkpoints: list[Path]) -> None:
        self._url = url.rstrip("/")
        self._turn: Iterator[Path] = itertools.cycle(checkpoints)
        self._number = itertools.count(1)
        self._http = httpx.Client(timeout=600)

    def push(self, step: int | None = None) -> Update:
        """Pause, reload, reset the prefix cache, resume."""
        checkpoint = next(self._turn)
        update = Update(f"{checkpoint.name}-{next(self._number)}", time.monotonic(), step=step)
        update.commit_sent = update.began
        try:
            self._call("/pause", params={"mode": "keep", "clear_cache": "false"})
            try:
                arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
                self._call("/collective_rpc", json=arguments)
                self._call("/reset_prefix_cache")
            finally:
                self._call("/resume")
        except httpx.HTTPError as error:
            update.error = type(error).__name__
        update.committed = time.monotonic()
        return update

    def _call(self, path: str, **arguments: Any) -> None:
        self._http.post(self._url + path, **arguments).raise_for_status()


class Pusher:
    """Pushes from a process of its own, which one greenlet at a time talks to.

    `options`: `through` (`fp8ext` or `stock`), `url`, `checkpoints`, and for `fp8ext` `key`, `running` and `files`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        line = [sys.executable, "-m", "vllm_fp8ext.loadtest.weights"]
        pipe = gevent.subprocess.PIPE
        self._process = gevent.subprocess.Popen(line, stdin=pipe, stdout=pipe)
        self._ask(options)

    def push(self, step: int | None = None) -> Update:
        """Change the weights once."""
        return Update(**self._ask({"step": step}))

    def close(self) -> None:
        """End the process."""
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
    """Do what the lines on the standard input ask for."""
    options = json.loads(sys.stdin.readline())
    checkpoints = [Path(path) for path in options["checkpoints"]]
    pusher: Fp8ext | Stock
    if options["through"] == "stock":
        pusher = Stock(options["url"], checkpoints)
    else:
        pusher = Fp8ext(
            options["url"], options["key"], checkpoints, running=options["running"], files=options["files"]
        )
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        update = pusher.push(json.loads(line)["step"])
        print(json.dumps(dataclasses.asdict(update)), flush=True)


if __name__ == "__main__":
    main()
