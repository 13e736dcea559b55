# SPDX-License-Identifier: Apache-2.0
"""Updates and sleep, in which an engine gives its GPU memory back."""

from collections.abc import Callable

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import raise_first
from vllm_fp8ext.update.contract.update_errors import NO_CURRENT_WEIGHTS, NO_WEIGHTS
from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.jobs import Jobs

DISCARDING = 2
"""The level of sleep from which on weights are not kept."""


class Sleeping:
    """Called as memory is given back and taken again. `give_up`: ends the open update, if there is one."""

    def __init__(self, core: Core, committer: Committer, jobs: Jobs, give_up: Callable[[], None]) -> None:
        self._core = core
        self._committer = committer
        self._jobs = jobs
        self._give_up = give_up
        self._discarded = False
        """True while memory that lost its contents has not been filled again."""

    def require_allowed(self) -> None:
        """Require that nothing stands against giving memory back.

        Raises:
            UpdateError: `update-open`: a part of what is served has been overwritten in place.
        """
        if self._committer.held:
            message = "an update in place is under way: the engine can't sleep before its commit"
            raise UpdateError("update-open", message)

    def before(self, level: int) -> None:
        """Memory is about to be given back: let what is under way end. Raises as `require_allowed` does."""
        self.require_allowed()
        if self._discards(level):
            self._give_up()
            raise_first(self._core.ranks(RankMethod.SAVE_CONSTANTS))
        self._jobs.settle()

    def begun(self, level: int) -> None:
        """Memory was given back; from level 2 on, what is served is lost."""
        if self._discards(level):
            reason = f"its weights were discarded by sleep level {level}"
            known = self._committer.poisoned
            self._committer.condemn(known if known in (NO_WEIGHTS, NO_CURRENT_WEIGHTS) else reason)
            self._discarded = True

    def waking(self) -> None:
        """Memory is about to be taken again, which a trainer may just have given back."""
        if self._core.settings.staging != "none":
            raise_first(self._core.ranks(RankMethod.CLOSE_SOURCES))

    def ended(self) -> None:
        """Memory is back, or a part of it."""
        if self._discarded and not self._core.asleep():
            raise_first(self._core.ranks(RankMethod.RESTORE))
            self._discarded = False

    def _discards(self, level: int) -> bool:
        return level >= DISCARDING and self._core.settings.staging != "none"
