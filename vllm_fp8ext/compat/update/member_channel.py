# SPDX-License-Identifier: Apache-2.0
"""Calls between the engine cores of one server: core 0 calls the others.

Each of the others listens on a socket of this machine that has no file. Who connects must have the key that the launcher has
given to the processes that it started. A thread there answers pings at once, and hands calls to the core's main thread.
"""

import contextlib
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, NoReturn

from vllm_fp8ext.compat.update.core_member import CoreMember
from vllm_fp8ext.compat.update.core_thread import CoreThread
from vllm_fp8ext.update.engine.core_group import CoreReply

FEATURE: str = "core"
WHY: str = "Call one engine core from another one: vLLM's cores are called by API server processes alone."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's engine cores can call each other"

logger = logging.getLogger("vllm.fp8ext")

_FAMILY = "AF_UNIX"
_PING, _PONG = "ping", "pong"
_LOOK_SECONDS = 1.0
_PONG_SECONDS = 10.0
"""Longest time that the thread which listens takes to answer a ping."""
_CONNECT_PAUSE = 0.05


def _address(name: str, index: int) -> str:
    """Return an address in Linux's abstract namespace, which ends with its process."""
    return f"\0fp8ext-{name}-{index}"


class LocalMember:
    """The core of this process. `member`: makes its access on its main thread, once."""

    def __init__(self, thread: CoreThread, member: Callable[[], CoreMember]) -> None:
        self._thread = thread
        self._member = member
        self._reply: Future[CoreReply] = Future()

    def send(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Call a method between two steps."""
        self._reply = self._thread.submit(lambda: self._member().answer(name, arguments))

    def receive(self) -> CoreReply:
        """Wait for the answer."""
        return self._reply.result()


class RemoteMember:
    """The core of another process, found by the cores' `name`.

    `end` ends this process; `seconds`: a silence that is looked into.
    """

    def __init__(self, name: str, index: int, seconds: float, end: Callable[[str], NoReturn]) -> None:
        self._index, self._seconds, self._end = index, seconds, end
        self._connection = self._connect(name)

    def send(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Call a method between two steps."""
        try:
            self._connection.send((name, arguments))
        except OSError:
            self._gone()

    def receive(self) -> CoreReply:
        """Wait for the answer; a step may take long, and pings tell that the process runs."""
        quiet, pinged = time.monotonic(), False
        try:
            while True:
                while not self._connection.poll(_LOOK_SECONDS):
                    silent = time.monotonic() - quiet
                    if pinged and silent > _PONG_SECONDS:
                        self._end(f"data-parallel rank {self._index} does not run at all")
                    if not pinged and silent > self._seconds / 2:
                        self._connection.send((_PING, ()))
                        quiet, pinged = time.monotonic(), True
                answer = self._connection.recv()
                if answer != _PONG:
                    reply: CoreReply = answer
                    return reply
                quiet, pinged = time.monotonic(), False
        except (EOFError, OSError):
            self._gone()

    def _gone(self) -> NoReturn:
        self._end(f"data-parallel rank {self._index} has ended")

    def _connect(self, name: str) -> Connection:
        until, key = time.monotonic() + self._seconds, multiprocessing.current_process().authkey
        while True:
            try:
                return Client(_address(name, self._index), _FAMILY, authkey=key)
            except ConnectionRefusedError:
                if time.monotonic() > until:
                    self._end(f"data-parallel rank {self._index} did not listen for {self._seconds:g} s")
                time.sleep(_CONNECT_PAUSE)


def listen(name: str, index: int, thread: CoreThread, member: Callable[[], CoreMember]) -> None:
    """Take the calls of core 0 on a thread, as long as this process lives. `index`: of this core.

    Who connects is asked for the key on a thread of its own: one who says nothing holds up nobody.
    """
    key = multiprocessing.current_process().authkey
    listener = Listener(_address(name, index), _FAMILY)

    def take(connection: Connection) -> None:
        with connection:
            try:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
            except (multiprocessing.AuthenticationError, EOFError, OSError):  # somebody else's process
                return
            _answer_calls(connection, thread, member)

    def serve() -> None:
        while True:
            with contextlib.suppress(OSError):  # who connected has gone
                _start(take, listener.accept())

    _start(serve)


def _start(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, name="fp8ext-member", daemon=True).start()


def _answer_calls(connection: Connection, thread: CoreThread, member: Callable[[], CoreMember]) -> None:
    sending = threading.Lock()

    def send(answer: Any) -> None:
        with sending:
            connection.send(answer)

    def answer(name: str, arguments: tuple[Any, ...]) -> None:
        reply = member().answer(name, arguments)
        try:
            send(reply)
        except OSError:
            logger.warning("fp8ext: data-parallel rank 0 did not wait for the answer to %s", name)

    try:
        while True:
            name, arguments = connection.recv()
            if name == _PING:
                send(_PONG)
            else:
                thread.submit(lambda name=name, arguments=arguments: answer(name, arguments))  # type: ignore[misc]
    except (EOFError, OSError):
        logger.info("fp8ext: data-parallel rank 0 calls no more")
