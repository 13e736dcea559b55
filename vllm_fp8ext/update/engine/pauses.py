# SPDX-License-Identifier: Apache-2.0
"""Pauses of generation that others ask for: how long they last, and their end where nobody ends them."""

import logging
from collections.abc import Callable

from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.timestamp import Moment

logger = logging.getLogger("vllm.fp8ext")


class Pauses:
    """Looks at each call whether the engine is paused: a pause is known from the first call in it."""

    def __init__(self, core: Core, committer: Committer, clock: Callable[[], Moment]) -> None:
        self._core = core
        self._committer = committer
        self._clock = clock
        self._since: float | None = None

    @property
    def seconds(self) -> float | None:
        """How long others have paused the engine, or None while it is not paused."""
        return None if self._since is None else self._clock().monotonic - self._since

    def tick(self) -> None:
        """Look, and end a pause that is longer than `pause_deadline_seconds`."""
        committer = self._committer
        if not self._core.paused() or committer.held or committer.waits or committer.poisoned is not None:
            self._since = None
            return
        now = self._clock().monotonic
        if self._since is None:
            self._since = now
        longest = self._core.settings.pause_deadline_seconds
        if longest is not None and now - self._since >= longest:
            logger.warning(
                "fp8ext: generation goes on: it was paused for pause_deadline_seconds, %g", longest
            )
            self._core.unpause()
            self._since = None
