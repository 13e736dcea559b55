# SPDX-License-Identifier: Apache-2.0
"""Seeds: processes without threads in which modules are imported, and which fork programs for the process that made them.

A program is a child of who asks for it, as one that is executed would be: a seed forks a process that forks the program
and ends, while the asking process is a subreaper.
"""

import contextlib
import ctypes
import fcntl
import os
import pickle
import signal
import socket
import struct
import threading
from dataclasses import dataclass

_PR_SET_CHILD_SUBREAPER = 36
_ENDING = signal.SIGINT, signal.SIGTERM
"""Signals that a seed leaves to its programs: one that comes while a program begins ends it then."""
_FDS_PER_MESSAGE = 64
"""Most descriptors of one request; Linux sends up to 253 at once."""
_LENGTH = struct.Struct("!Q")
_PID = struct.Struct("!q")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A program to fork.

    arguments: the words after the interpreter, without its options: `-m MODULE …`, `-c CODE …` or `SCRIPT …`.
    environment: all variables. folder: the working directory. descriptors: numbers that the sent descriptors get, in their
    order. session: whether it begins a session. group: the process group that it joins otherwise.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    session: bool = False
    group: int | None = None
    umask: int


class Seed:
    """The asking end of a seed."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._owner = os.getpid(), os.getsid(0)

    @property
    def usable(self) -> bool:
        """Whether this process is the one that made it, in the same session: no process joins another one."""
        return self._owner == (os.getpid(), os.getsid(0))

    def fork(self, request: Request, descriptors: list[int]) -> int:
        """Start a program with these descriptors; returns its process id.

        Raises:
            ConnectionError: the seed has ended.
        """
        assert len(descriptors) == len(request.descriptors) <= _FDS_PER_MESSAGE
        body = pickle.dumps(request)
        with self._lock:
            _be_subreaper(True)
            try:
                socket.send_fds(self._control, [_LENGTH.pack(len(body))], descriptors)
                self._control.sendall(body)
                return int(_PID.unpack(_read(self._control, _PID.size))[0])
            finally:
                _be_subreaper(False)


def serve(control: socket.socket) -> tuple[Request, Seed]:
    """Fork what comes on `control` until its other end is closed, which ends the process. Returns in each program, which
    has the session, the descriptors, the folder and the variables it was to have, and a seed of its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    while True:
        try:
            request, received = _receive(control)
        except ConnectionError:
            os._exit(0)
        go, let_go = os.pipe()
        told, tell = os.pipe()
        between = os.fork()
        if not between:
            program = os.fork()
            if program:
                os.write(tell, _PID.pack(program))
                os._exit(0)
            for descriptor in (let_go, told, tell):
                os.close(descriptor)
            control.close()
            os.read(go, 1)
            os.close(go)
            if request.session:
                os.setsid()
            elif request.group not in (None, os.getpgrp()):
                os.setpgid(0, request.group or 0)
            ours, control = socket.socketpair()
            if os.fork():
                control.close()
                return request, Seed(_become(request, received, ours))
            ours.close()
        else:
            os.waitpid(between, 0)
            pid = os.read(told, _PID.size)
            os.write(let_go, b"!")
            for descriptor in (go, let_go, told, tell):
                os.close(descriptor)
            with contextlib.suppress(ConnectionError):
                control.sendall(pid)
        for descriptor in received:
            os.close(descriptor)


def _receive(control: socket.socket) -> tuple[Request, list[int]]:
    head, received, _, _ = socket.recv_fds(control, _LENGTH.size, _FDS_PER_MESSAGE)
    if len(head) < _LENGTH.size:
        head += _read(control, _LENGTH.size - len(head))
    return pickle.loads(_read(control, _LENGTH.unpack(head)[0])), list(received)


def _become(request: Request, received: list[int], control: socket.socket) -> socket.socket:
    """Take what a program was given; returns `control` with a number that is above those of the program."""
    above = 1 + max([2, *request.descriptors, *received, control.fileno()])
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in received]
    lasting = socket.socket(fileno=fcntl.fcntl(control, fcntl.F_DUPFD_CLOEXEC, above))
    control.close()
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(moved, request.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.umask(request.umask)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    return lasting


def _read(control: socket.socket, count: int) -> bytes:
    """So many bytes.

    Raises:
        ConnectionError: the other end was closed before.
    """
    content = b""
    while len(content) < count:
        piece = control.recv(count - len(content))
        if not piece:
            raise ConnectionError("the other end is closed")
        content += piece
    return content


def umask() -> int:
    """Of this process."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _be_subreaper(yes: bool) -> None:
    """Have orphans among its descendants become children of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
