# SPDX-License-Identifier: Apache-2.0
"""Commits and rollbacks, from the swap to the proof that every rank is right."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.labels import Label, default_version
from vllm_fp8ext.update.contract.results import Result, RolledBack, UpdateState, Waiting
from vllm_fp8ext.update.engine.commit_check import CommitCheck
from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.jobs import Flow
from vllm_fp8ext.update.engine.kv_scales import KvEngine, ScaleSet
from vllm_fp8ext.update.engine.session import Running, Session, State
from vllm_fp8ext.update.engine.totals import Totals
from vllm_fp8ext.update.engine.updates import Updates
from vllm_fp8ext.update.engine.verification import CommittedFingerprints

ROLLBACK = "rollback"
"""Name under which a rollback waits, beside the ids of updates."""


class Commits:
    """Serves what was prepared, or what was served before. `abandon`: gives an update up."""

    def __init__(
        self,
        core: Core,
        committer: Committer,
        check: CommitCheck,
        kv: KvEngine,
        updates: Updates,
        fingerprints: CommittedFingerprints,
        totals: Totals,
        abandon: Callable[[str], object],
    ) -> None:
        self._core = core
        self._committer = committer
        self._check = check
        self._kv = kv
        self._updates = updates
        self._fingerprints = fingerprints
        self._totals = totals
        self._abandon = abandon
        self.last: dict[str, Any] | None = None
        """Summary of the last committed update."""

    def wait(self) -> Waiting:
        """Make the answer of a call that is to come again."""
        return Waiting(requests=self._core.unfinished())

    def commit(self, session: Session) -> Flow[Result]:
        """Serve a prepared update from the next step on; ends when every rank was seen to serve it."""
        if self._check.pending():
            return self.wait()
        if session.state is State.COMMITTED:
            return session.describe()
        session.require_prepared()
        self._committer.require_healing(session.partial)
        session.check_base(self._committer.live.epoch)
        session.touch(self._updates.clock())
        label = self._committer.live.next(session.version, aborts=session.running is Running.ABORT)
        phases = self._swap(session, label)
        if phases is None:
            return self.wait()
        self._fingerprints.keep(label, session.fingerprints, self._committer.previous)
        session.exchanged()
        session.took("pause", *self._committer.paused)
        session.seconds.update(phases)
        seconds = yield from self._check.run(partial(self._lose, session))
        return self._finish(session, label, seconds)

    def _swap(self, session: Session, label: Label) -> dict[str, float] | None:
        try:
            return self._committer.run(
                *(session.id, label, session.running, session.wait_seconds, _scales(session, label)),
                cached=session.cached,
                through_pause=session.through_pause,
                becomes_current=session.becomes_current,
            )
        except UpdateError:
            if self._committer.poisoned:
                self._lose(session)
            raise

    def _lose(self, session: Session) -> None:
        """Take back what was staged: the commit failed half-way, and nobody knows what is served."""
        session.forget()
        if session.partial:
            self._abandon(session.id)

    def _finish(self, session: Session, label: Label, seconds: float) -> UpdateState:
        now = time.perf_counter()
        session.took("verify", now - seconds, now)
        session.ended_at(now)
        served_at = self._updates.clock().unix - (now - self._committer.paused[1])
        session.commit({**label.served(), "pause_seconds": session.seconds["pause"], "served_at": served_at})
        session.kv_scales = self._kv.describe(label.epoch)
        self._totals.ended(session.state)
        self._totals.took(session.seconds)
        self._totals.bytes += session.bytes
        self.last = {
            "id": session.id,
            "bytes": session.bytes,
            "seconds": dict(session.seconds),
            "quantization_error": session.quantization_error,
        }
        return session.describe()

    def roll_back(self, running: Running, wait_seconds: float | None) -> Flow[Result]:
        """Serve the previous weights again, as a new epoch; ends when every rank was seen to serve them."""
        if self._check.pending():
            return self.wait()
        previous = self._committer.previous
        if previous is None:
            self._committer.stop_waiting(ROLLBACK)  # when a chunk came while it waited
            raise UpdateError(
                "no-previous",
                "no previous weights: no update was committed, or a newer one was begun, even if it was refused",
            )
        label = self._committer.live.next(previous.version, aborts=running is Running.ABORT)
        settings = self._core.settings.kv_scales
        cached = settings.cached if settings else "rescale"
        phases = self._committer.run(ROLLBACK, label, running, wait_seconds, cached=cached)
        if phases is None:
            return self.wait()
        self._fingerprints.keep(label, self._fingerprints.of(previous), self._committer.previous)
        updating = self._updates.under_way
        if updating is not None and not updating.named:
            updating.version = default_version(label.epoch + 1)
        phases["verify"] = yield from self._check.run(lambda: None)
        self._totals.ended("rolled-back")
        self._totals.took(phases)
        return RolledBack(**label.served(), seconds=phases)

    def stop_rollback(self) -> None:
        """Give up a rollback that waits for running requests."""
        self._committer.stop_waiting(ROLLBACK)


def _scales(session: Session, label: Label) -> ScaleSet | None:
    """Return the scales of an update's KV cache, for the epoch of `label`."""
    kv, request = session.kv, session.kv_request
    return replace(kv, epoch=label.epoch) if kv and request and request.policy != "static" else kv
