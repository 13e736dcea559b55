# SPDX-License-Identifier: Apache-2.0
"""The commit proper: between two engine steps, on all ranks or none."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.log_text import shown
from vllm_fp8ext.update.contract.fields import WAIT_SECONDS
from vllm_fp8ext.update.contract.labels import Label, first_label
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import RankResult, SwapTime, all_of, failures
from vllm_fp8ext.update.contract.update_errors import NOT_CURRENT, not_generating
from vllm_fp8ext.update.engine.kv_scales import KvEngine, ScaleSet
from vllm_fp8ext.update.engine.session import Running
from vllm_fp8ext.update.engine.totals import Totals

logger = logging.getLogger("vllm.fp8ext")

WAIT_GRACE_SECONDS = 10.0


class Core(Protocol):
    """Interface of an engine core for updates (`compat.update.core_access.CoreAccess`)."""

    settings: Settings
    quantization: str | None
    kv_cache_dtype: str
    vocabulary: int
    longest_prompt: int
    instance: str
    weight_transfer: str | None
    device_type: str

    @property
    def compiled(self) -> list[dict[str, int]]: ...
    @property
    def pids(self) -> list[int]: ...

    def ranks(self, method: RankMethod, *args: Any) -> list[RankResult]: ...
    def stop(self) -> None: ...
    def drain(self) -> None: ...
    def end(self, reason: str) -> NoReturn: ...
    def begin_step(self) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...
    def resume(self) -> float | None: ...
    def paused(self) -> bool: ...
    def pause_state(self) -> Any: ...
    def pause_again(self, state: Any) -> None: ...
    def unpause(self) -> None: ...
    def relabel(self, label: Label) -> None: ...
    def interrupted(self) -> bool: ...
    def asleep(self) -> bool: ...
    def admit_no_more(self) -> None: ...
    def unfinished(self) -> int: ...
    def irreplaceable(self) -> int: ...
    def abort_running(self) -> None: ...
    def refuse_requests(self) -> None: ...
    def accept_requests(self) -> None: ...
    def restart_prompts(self) -> tuple[int, int]: ...
    def enter_epoch(self, label: Label, *, recompute: bool) -> None: ...
    def time_next_step(self, report: Callable[[float], None]) -> None: ...
    def recent_tokens(self) -> list[list[int]]: ...
    def held_blocks(self) -> list[dict[str, Any]]: ...
    def draft_acceptance(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class PendingCommit:
    """A commit, or a rollback, that lets running requests finish first."""

    key: str
    until: float


class Committer:
    """Knows the served label, and runs the step that changes it."""

    def __init__(self, core: Core, totals: Totals, kv: KvEngine) -> None:
        self._core = core
        self._kv = kv
        self._totals = totals
        self.live = first_label(core.instance)
        self.previous: Label | None = None
        """Label of what the shadow holds, when it holds complete weights."""
        self.poisoned: str | None = None
        self.exchanges = 0
        """Number of swaps that were tried."""
        self.stall_seconds: float | None = None
        """Time from the last swap's pause to the end of the next engine step; None without requests."""
        self.paused = (0.0, 0.0)
        """From when to when the engine stood still for the last exchange, by `time.perf_counter()`."""
        self._waiting: PendingCommit | None = None
        self._held: float | None = None
        """Since when the engine stands still for an update in place."""
        self._wrote = False
        """True once that update has overwritten anything."""

    def tick(self) -> None:
        """Forget a wait that nobody asks about any more."""
        if self._waiting is not None and time.monotonic() > self._waiting.until + WAIT_GRACE_SECONDS:
            self.stop_waiting(self._waiting.key)

    def lose_previous(self) -> None:
        """Forget what the shadow held: a tensor is about to be staged."""
        self.previous = None

    def hold(self, running: Running) -> None:
        """Stand still until `run`, or until `give_up`: what is served is about to be overwritten."""
        if self._held is not None:
            return
        self._held, self._wrote = time.perf_counter(), False
        self._core.hold()
        if running is Running.ABORT:
            self._core.abort_running()

    def wrote(self) -> None:
        """Some of what is served was overwritten."""
        self._wrote = True

    def give_up(self, what: str, *, writing: bool) -> None:
        """The update that the engine stands still for will not be committed: nobody can be served by half of it. Where
        nothing was overwritten, nor is `writing` under way, the engine goes on as before."""
        if self._held is None:
            return
        self._held = None
        if self._wrote or writing:
            self.condemn(f"{what} ended half-way, in place")
        elif self.poisoned is not None:
            self.condemn(self.poisoned)
        else:
            self._core.resume()

    def run(
        self,
        key: str,
        label: Label,
        running: Running,
        wait_seconds: float | None,
        scales: ScaleSet | None = None,
        cached: str = "rescale",
        *,
        through_pause: bool = False,
        becomes_current: bool = True,
    ) -> dict[str, float] | None:
        """Swap served weights and shadow, and serve `label` from then on. `scales`: those of the KV cache, by default the
        previous ones. `cached`: what becomes of K and V that running requests keep.

        The exchange takes its turn between two steps: it is queued behind those in flight, which end under the old label,
        and where that can be the next is queued behind it. `through_pause`: somebody may have paused the engine, which then
        stays paused. `becomes_current`: an engine that generated nothing before does so from now on; otherwise it waits for
        `declare_current`. Returns the seconds of each phase, or None while running requests
        are waited for: call again.

        Raises:
            UpdateError: `paused`, `not-recomputable`, `wait-timeout`, `exchange-failed` (nothing has changed), or `poisoned`.
        """
        if running is Running.WAIT and self.poisoned is None and self._waits(key, wait_seconds):
            return None
        own_pause = self._held is not None or self.poisoned is not None
        others_pause = through_pause and not own_pause and self._core.paused()
        pause_state = self._core.pause_state() if others_pause else None
        self._require_ready(key, running, cached, through_pause=others_pause)
        held, self._held = self._held, None
        self._waiting = None
        stopped = time.perf_counter()
        self._core.stop()
        healing = self.poisoned is not None
        try:
            self._swap_all()
        except UpdateError:
            if pause_state is not None and self.poisoned is None:
                self._core.pause_again(pause_state)
            raise
        self._core.drain()
        drained = time.perf_counter()
        stalls = self._leave(label, running, scales, cached, healing=healing)
        self.previous, self.live = None if healing or held else self.live, label
        if healing and becomes_current:
            self._core.accept_requests()
        skew = self._core.resume()
        if pause_state is not None:
            self._core.pause_again(pause_state)
        resumed = time.perf_counter()
        if healing and not becomes_current:
            self._core.stop()
            self.poisoned = NOT_CURRENT
        elif pause_state is None:
            self._core.begin_step()
        start, self.stall_seconds = held or stopped, None
        if stalls:
            self._core.time_next_step(lambda end: self._stalled(end - start))
        phases = self._phases(start, stopped, drained, resumed)
        logger.info(
            "fp8ext: epoch %d (version %s) is served; paused for %.1f ms",
            *(label.epoch, shown(label.version), phases["pause"] * 1e3),
        )
        return phases if skew is None else {**phases, "skew": skew}

    def _leave(
        self, label: Label, running: Running, scales: ScaleSet | None, cached: str, *, healing: bool
    ) -> bool:
        """Do to requests and caches what a commit does before the next step; tell whether requests run."""
        if running is Running.ABORT:
            self._core.abort_running()
        run_on = self._core.unfinished() > 0
        recompute = healing or running is Running.RECOMPUTE
        self._separate_caches(label, scales, cached, recompute=recompute)
        return run_on

    def _phases(self, start: float, stopped: float, drained: float, resumed: float) -> dict[str, float]:
        """Wait for the exchange; returns the seconds of each phase, and notes when the pause began and ended."""
        exchange = self._settle()
        # `settle` may come late, after the host has queued the next step; the exchange began before `drained`
        over = min(time.perf_counter(), drained + exchange)
        self.paused = (start, max(resumed, over))
        return {
            "drain": drained - stopped,
            "exchange": exchange,
            "caches": resumed - drained,
            "pause": self.paused[1] - start,
        }

    def _require_ready(self, key: str, running: Running, cached: str, *, through_pause: bool) -> None:
        """Require that the swap can begin; a wait for running requests ends where it can't."""
        if self._waiting is None and not through_pause:
            self.require_running()
        try:
            self.require_recomputable(running, cached)
        except UpdateError:
            self.stop_waiting(key)
            raise

    def _separate_caches(
        self, label: Label, scales: ScaleSet | None, cached: str, *, recompute: bool
    ) -> None:
        """Enter the epoch of `label`: cached K and V of the old weights are found no more."""
        try:
            if not recompute:
                self._totals.restarted(*self._core.restart_prompts())
            keep = not recompute and self._core.unfinished() > 0
            recompute |= self._kv.exchanged(scales, keep=keep, cached=cached)
            self._core.enter_epoch(label, recompute=recompute)
        except Exception as error:
            self.poison(f"the caches could not be separated from the old weights: {error}")

    def stop_waiting(self, key: str) -> None:
        """Forget a commit that waits: new requests start again, unless somebody else has stopped the engine meanwhile."""
        if self._waiting is not None and self._waiting.key == key:
            self._waiting = None
            self._core.resume()

    def require_running(self) -> None:
        """Raises `UpdateError` (`paused`) while somebody else has stopped the engine."""
        if self._core.paused() and self._held is None and self.poisoned is None:
            raise UpdateError("paused", "the engine is paused or asleep: resume it first")

    def require_recomputable(self, running: Running, cached: str) -> None:
        """Raise `not-recomputable` where K and V are to be computed again and some can't be. What came while the engine
        stands still has none, and a poisoned engine has no requests."""
        recompute = running is Running.RECOMPUTE or (cached == "recompute" and self._kv.enabled)
        if not recompute or self.held or self.poisoned:
            return
        count = self._core.irreplaceable()
        if count:
            raise UpdateError(
                "not-recomputable",
                f"the K and V of {count} requests can't be computed again: they take their input bit by bit, or wait for K "
                "and V from elsewhere. End them, or let running requests keep their K and V, or abort them",
                requests=count,
            )

    def require_healing(self, partial: bool) -> None:
        """Raises `UpdateError` (`poisoned`, `not-current`) for a `partial` update while the engine generates nothing."""
        if not partial or not self.poisoned:
            return
        if self.poisoned == NOT_CURRENT:
            message = f"expected a full update, or word that the engine is current first: {NOT_CURRENT}"
            raise UpdateError("not-current", message, status=503)
        raise UpdateError("poisoned", "only a full update heals a poisoned engine", status=503)

    @property
    def held(self) -> bool:
        """True while the engine stands still for an update in place."""
        return self._held is not None

    @property
    def waits(self) -> bool:
        """True while a commit lets running requests finish first."""
        return self._waiting is not None

    def require_whole(self) -> None:
        """Raise `staging` while an update in place has overwritten a part of what is served."""
        if self._held is not None:
            raise UpdateError("staging", "an update in place is under way: ask when it is committed")

    def _waits(self, key: str, seconds: float | None) -> bool:
        if self._waiting is not None and self._core.interrupted():
            self.stop_waiting(key)
        if self._waiting is None:
            if self._core.paused():
                return False
            self._core.admit_no_more()
            self._waiting = PendingCommit(
                key, time.monotonic() + (WAIT_SECONDS if seconds is None else seconds)
            )
        if self._waiting.key != key:
            raise UpdateError("commit-waits", "another commit or rollback waits for running requests")
        if not self._core.unfinished():
            return False
        if time.monotonic() < self._waiting.until:
            return True
        left = self._core.unfinished()
        self.stop_waiting(key)
        raise UpdateError(
            "wait-timeout",
            f"{left} requests were still running at the deadline; nothing has changed",
            running=left,
        )

    def _stalled(self, seconds: float) -> None:
        self.stall_seconds = seconds
        self._totals.stalled(seconds)

    def _settle(self) -> float:
        """Wait until the exchange is done on every rank; the longest time that it took."""
        results = self._core.ranks(RankMethod.WAIT_FOR_SWAP)
        if failures(results):
            self.poison(f"the exchange did not end: {results}")
        return max(result.seconds for result in all_of(SwapTime, results))

    def _swap_all(self) -> None:
        """Exchange on every rank. When some fail (each undoes its own part), the others swap back; if that fails too, no
        rank can be trusted and the engine is poisoned: it generates nothing until a full update heals it."""
        self.exchanges += 1
        results = self._core.ranks(RankMethod.SWAP)
        failed = failures(results)
        if not failed:
            self.poisoned = None
            return
        error = failed[0].error
        swapped = [rank for rank, result in enumerate(results) if not isinstance(result, Failure)]
        undone = self._core.ranks(RankMethod.SWAP, swapped) if swapped else []
        if not all(failure.unchanged for failure in failed) or failures(undone):
            self.poison(str(error))
        if self.poisoned is None:
            self._settle()
            self._core.resume()
        else:
            self._core.ranks(RankMethod.WAIT_FOR_SWAP)
        raise error

    def poison(self, reason: str) -> NoReturn:
        """An exchange has left what nobody knows. Raises `UpdateError` (`poisoned`)."""
        # tensors that come to heal it must not get into an exchange under way
        self._core.ranks(RankMethod.WAIT_FOR_SWAP)
        self.condemn(reason)
        raise UpdateError("poisoned", f"the commit failed half-way: {reason}", status=503)

    def declare_current(self, epoch: int, version: str | None) -> None:
        """Answer requests with what is loaded, as `version` where that is given. Of an engine that does so already, the
        version is checked.

        Raises:
            UpdateError: `no-weights` or `poisoned`; `stale-base`: another `epoch` is served; `wrong-state`: it is current, as
                another version; `staging`.
        """
        if self.poisoned not in (None, NOT_CURRENT):
            raise not_generating(self.poisoned)
        self.require_whole()
        if epoch != self.live.epoch:
            message = (
                f"expected what is said of epoch {self.live.epoch}, which is served, found epoch {epoch}"
            )
            raise UpdateError("stale-base", message, expected=self.live.epoch, found=epoch)
        if self.poisoned is None:
            if version not in (None, self.live.version):
                message = f"the engine is current, as version {self.live.version}: expected the same, found {version}"
                raise UpdateError("wrong-state", message)
            return
        if version is not None:
            self.live = self.live._replace(version=version)
            self._core.relabel(self.live)
        self.poisoned = None
        self._core.accept_requests()
        self._core.resume()
        logger.info("fp8ext: epoch %d (version %s) is current", self.live.epoch, shown(self.live.version))

    def await_weights(self, reason: str) -> None:
        """Serve nothing until a full update was staged and committed: there are no weights yet, or not the current ones."""
        self._core.stop()
        self.poisoned = reason
        logger.warning("fp8ext: %s: requests are refused until a full update is committed", reason)
        self._core.refuse_requests()

    def condemn(self, reason: str) -> None:
        """Nobody knows what is served: stay paused, end every request, until a full update was staged and committed."""
        self._core.release()
        self._core.stop()
        self._core.drain()
        self._waiting = None
        self.poisoned, self.previous = reason, None
        logger.critical("fp8ext: the engine is poisoned and generates nothing: %s", shown(reason))
        self._core.refuse_requests()
