# SPDX-License-Identifier: Apache-2.0
"""Commands that are told to end while they start something."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.signals import end_on_sigterm, held_back


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    end_on_sigterm()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_end(number: signal.Signals) -> None:
    done = []

    def start() -> None:
        with held_back():
            signal.raise_signal(number)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    with held_back():
        pass


def test_what_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)


def test_another_thread_holds_nothing_back() -> None:
    collected: list[Any] = []

    def work() -> None:
        with held_back():
            collected.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert collected == [signal.default_int_handler]


def test_a_server_that_is_being_started_ends_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Server, "popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Server(EARLY, tmp_path / "server.log")
    [process] = started
    assert process.poll() is not None
