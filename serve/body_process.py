# SPDX-License-Identifier: Apache-2.0
"""Bodies from outside are parsed and checked in a process of their own: `python -m vllm_fp8ext.serve.body_process`.

To parse a megabyte of JSON takes a tenth of a second, and to list what is wrong with it seconds. A thread would keep Python
from everything else for as long, and so hold up every stream of tokens. The process ends with its server: its input does.
"""

import contextlib
import marshal
import os
import signal
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.body_checks import BodyChecks, Limits
from vllm_fp8ext.serve.work import in_thread
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor

_LENGTH = struct.Struct("<Q")
_SMALL = 1024
"""Largest body, in bytes, that is checked at once where it has come: a millisecond, whatever is in it."""
_STEPS_BEHIND = 10
"""Niceness of the process: it gives way to others that want a core."""


class BodyProcess:
    """The process of one server. It starts when it is first needed, and again when it has ended."""

    def __init__(self) -> None:
        self._here = BodyChecks()
        self._manifest: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._turns = ThreadPoolExecutor(1, "fp8ext-bodies")
        """One question at a time, the first one first."""

    @property
    def limits(self) -> Limits:
        """Bounds of bodies."""
        return self._here.limits

    async def know(self, manifest: dict[str, Any]) -> None:
        """Bound bodies by a server's manifest (`GET /weights/manifest`), and compare them with it."""
        self._manifest = manifest
        self._here.run("manifest", manifest)
        await in_thread(self._end, executor=self._turns)
        await in_thread(self._started, executor=self._turns)

    async def json(self, model: str, body: bytes) -> dict[str, Any]:
        """Return the fields of a JSON body of this model (`module:name`), nested ones plain.

        Raises:
            UpdateError: `invalid-request`, `body-too-large`, `too-many-tensors`, or what is wrong with most of the tensors.
        """
        fields: dict[str, Any] = (await self._checked(len(body), "json", model, body))["fields"]
        return fields

    async def header(self, header: bytes, length: int, name: str) -> list[StoredTensor]:
        """Return every tensor of a safetensors body of `length` bytes. `name` stands for it in messages.

        Raises:
            UpdateError: as `safetensors_header.described_tensors`, or what is wrong with most of the tensors.
        """
        checked = await self._checked(len(header), "header", header, length, name)
        return [
            StoredTensor(TensorSpec(tensor, tuple(shape), dtype), start, size)
            for tensor, shape, dtype, start, size in checked["tensors"]
        ]

    def close(self) -> None:
        """End the process."""
        self._turns.shutdown(wait=False, cancel_futures=True)
        self._end()

    async def _checked(self, size: int, task: str, *arguments: Any) -> dict[str, Any]:
        if size <= _SMALL:
            result = self._here.run(task, *arguments)
        else:
            result = await in_thread(self._ask, task, *arguments, executor=self._turns)
        if "error" in result:
            raise UpdateError.from_dict(result["error"])
        return result

    def _ask(self, *question: Any) -> dict[str, Any]:
        try:
            return _exchange(self._started(), *question)
        except (OSError, EOFError) as error:
            self._end()
            message = f"the process that checks bodies has ended: {error!r}"
            raise UpdateError("internal", message, status=500) from error

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            line = sys.executable, "-P", "-m", __name__
            self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if self._manifest is not None:
                _exchange(self._process, "manifest", self._manifest)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError), process:  # closes its pipes, and waits
                process.kill()


def _exchange(process: "subprocess.Popen[bytes]", *question: Any) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    _write(process.stdin, question)
    return dict(_read(process.stdout))


def _write(pipe: IO[bytes], message: Any) -> None:
    content = marshal.dumps(message)
    pipe.write(_LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    """Raises `EOFError` at its end."""
    length = pipe.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise EOFError("nothing more comes")
    return marshal.loads(pipe.read(*_LENGTH.unpack(length)))


def _serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    checks = BodyChecks()
    with contextlib.suppress(EOFError):
        while True:
            _write(answers, checks.run(*_read(questions)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, to the server: it ends with that
    os.nice(_STEPS_BEHIND)
    _serve(sys.stdin.buffer, sys.stdout.buffer)
