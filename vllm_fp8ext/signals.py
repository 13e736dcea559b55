# SPDX-License-Identifier: Apache-2.0
"""How commands end that have started something."""

import contextlib
import signal
import threading
from collections.abc import Iterator

_ENDING = (signal.SIGINT, signal.SIGTERM)


def end_on_sigterm() -> None:
    """Have SIGTERM end this process as Ctrl-C does: what it has started, or opened, ends too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold signals that would end this process until the context is left. A process is being started, and nobody could end
    it yet. On other threads than the main one nothing interrupts anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: dict[int, None] = {}
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    # what is ignored, as SIGINT is in the background of a script, stays so in what is started
    usual = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in usual:
        signal.signal(number, lambda received, _: came.update({received: None}))
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for received in came:
            signal.raise_signal(received)
