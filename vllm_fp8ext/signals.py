# SPDX-License-Identifier: Apache-2.0
"""How commands end that have started something."""

import signal


def end_on_sigterm() -> None:
    """Have SIGTERM end this process as Ctrl-C does: what it has started, or opened, ends too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
