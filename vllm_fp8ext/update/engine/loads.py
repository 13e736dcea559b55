# SPDX-License-Identifier: Apache-2.0
"""Updates that trainers bring by calling `load_weights` on the served model inside the workers.

    load_weights … load_weights ──▶ end mark, or complete ──▶ commit
        │ anything is wrong
        ▼
     given up on every rank, and what is served stays

A call reaches the ranks without this engine. It tells them before the call whether tensors may come, and asks afterwards what
came: so an update is opened, fed, committed or given up when a call has returned on all ranks.
"""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.log_text import shown
from vllm_fp8ext.update.contract.kv_names import layer_scale
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.operations import Operation, RankMethod
from vllm_fp8ext.update.contract.rank_results import (
    Loaded,
    LoadEvent,
    LoadKind,
    StagedTensors,
    all_of,
    distinct,
    failures,
    summed,
)
from vllm_fp8ext.update.contract.results import JobStarted, Progress, Result, Waiting
from vllm_fp8ext.update.contract.update_errors import refusal
from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.kv_scales import KvEngine
from vllm_fp8ext.update.engine.native_tensors import merged
from vllm_fp8ext.update.engine.served_model import ServedModel
from vllm_fp8ext.update.engine.session import Session
from vllm_fp8ext.update.engine.timestamp import Moment
from vllm_fp8ext.update.engine.updates import OpenRequest, Updates

logger = logging.getLogger("vllm.fp8ext")

_MARKS = "finalize_layerwise_reload, process_weights_after_loading or finish_weight_update"
_PAUSE_SECONDS = 0.001
"""Seconds between two polls of a commit."""


class LoadedUpdates:
    """The update that calls on the model make. `handle`: runs an `Operation`; `abandon`: gives an update up by its id.

    `busy`: says why no tensors may come now, where that is not for another update.
    """

    def __init__(
        self,
        core: Core,
        committer: Committer,
        updates: Updates,
        model: ServedModel,
        *,
        clock: Callable[[], Moment],
        handle: Callable[[str, dict[str, Any]], Result],
        abandon: Callable[[str], object],
        busy: Callable[[], str | None],
        kv: KvEngine,
    ) -> None:
        self._core = core
        self._committer = committer
        self._updates = updates
        self._model = model
        self._clock = clock
        self._handle = handle
        self._abandon = abandon
        self._busy = busy
        self._kv = kv
        self._provided = kv.enabled and kv.policy == "provided"
        """True if the trainer brings the scales of the KV cache, among its tensors."""
        self._scales: dict[str, dict[str, list[float]]] = {}
        """Scales that have come, by layer and kind."""
        self._inplace = core.settings.staging == "inplace"
        self._id = uuid.uuid4().hex
        """Id of the update that is open, or will be."""
        self._unavailable = False
        """True if the ranks take no updates: they refuse to load."""
        self._failure: str | None = None
        self._completed = False
        """True if the last update was committed since everything had come: its end may be marked yet."""
        self._said_complete = False

    def before(self) -> None:
        """Tell ranks whether a call that begins may bring tensors, and for which update."""
        session = self._updates.sessions.get(self._id)
        if session is not None and not session.live:
            self._id = uuid.uuid4().hex
        refused = self._refused()
        seconds = self._core.settings.native_update_seconds
        permit = self._id, refused.as_dict() if refused else None, seconds
        if self._unavailable:
            return
        if self._inplace:
            self._core.drain()
        results = self._core.ranks(RankMethod.LOADS_PERMIT, *permit)
        self._unavailable = any(failure.kind == "updates-unavailable" for failure in failures(results))

    def _refused(self) -> UpdateError | None:
        """Return why no tensors may come now."""
        if self._core.asleep():
            return UpdateError("asleep", "load_weights: the weights are asleep, wake the engine first")
        other = self._updates.under_way
        if other is not None and other.id != self._id:
            message = f"load_weights: update {other.id} (version {other.version}) is open: one at a time"
            return UpdateError("update-open", message, open=other.id)
        busy = self._busy()
        if busy is not None:
            return UpdateError("commit-waits", f"load_weights: {busy}")
        if self._inplace and self._core.unfinished() and not self._committer.held:
            message = (
                "load_weights: staging inplace overwrites what requests run on: wait for them, or abort them"
            )
            return UpdateError("requests-running", message)
        return None

    def after(self, error: BaseException | None = None) -> None:
        """Take in what a call that has returned on all ranks, or failed, has brought; serve it if that was all.

        Raises:
            UpdateError: what is wrong. The update was given up, and what is served stays. Not where the call failed.
        """
        if self._unavailable:
            return
        loaded = all_of(Loaded, self._core.ranks(RankMethod.LOADS_TAKE))
        if not any(each.events for each in loaded):
            return
        if any(event.kind is LoadKind.TENSORS for each in loaded for event in each.events):
            self._committer.lose_previous()
        try:
            if error is not None:
                raise UpdateError("wrong-state", f"the call that brought tensors failed: {error!r}")
            if self._take(_by_event(loaded)):
                self._commit()
        except UpdateError as refused:
            self._fail(refused)
            if error is None:
                raise

    def _take(self, events: Sequence[Sequence[LoadEvent]]) -> bool:
        """Take in calls, of each what every rank tells; returns whether the update is to be served."""
        errors: list[UpdateError] = []
        ended = False
        for each in events:
            kind = each[0].kind
            if kind is LoadKind.TENSORS:
                error = self._take_tensors(each)
                errors += [error] if error is not None else []
            elif kind is LoadKind.END:
                ended = True
            else:
                self._begin(each[0])
        if errors:
            raise merged(errors)
        session = self._session()
        if session is None:
            if ended and not self._completed:
                why = f"; the last one ended: {self._failure}" if self._failure else ""
                message = f"{events[-1][0].call}: no tensor has come by load_weights{why}"
                raise UpdateError("no-update", message)
            return False
        return ended or self._is_complete(session)

    def _begin(self, event: LoadEvent) -> None:
        session = self._session()
        if session is None or not session.chunks:
            return
        again = event.kind is LoadKind.AGAIN
        reason = f"{event.call} came again: every tensor must" if again else f"{event.call} begins it anew"
        logger.warning("fp8ext: what came of update %s is dropped: %s", session.id, shown(reason))
        session.restart(whole=again)
        self._scales.clear()

    def _take_tensors(self, ranks: Sequence[LoadEvent]) -> UpdateError | None:
        """Enter one call's tensors; returns what is wrong with them."""
        failed = next((each.staged for each in ranks if isinstance(each.staged, Failure)), None)
        if failed is not None:
            raise failed.error
        tensors = ranks[0].tensors
        staged = [each.staged for each in ranks if isinstance(each.staged, StagedTensors)]
        problems = distinct([problem for each in staged for problem in each.problems])
        if not tensors and not problems:
            return None
        session = self._session() or self._open()
        key = f"load-{session.revision}"
        canonical = session.manifest.canonical
        specs = [TensorSpec(canonical(name), tuple(shape), dtype) for name, shape, dtype in tensors]
        session.touch(self._clock())
        if self._inplace:
            self._committer.hold(session.running)
            self._committer.wrote()
        if problems:
            return refusal(problems)
        if self._provided:
            self._take_scales(ranks[0].kv_scales)
        session.receive(key, specs, ranks[0].bytes)
        session.staged(key, [], summed(staged))
        return None

    def _open(self) -> Session:
        """Open the update that the ranks have staged for.

        Raises:
            UpdateError: as `Updates.open`.
        """
        committer, settings = self._committer, self._core.settings
        at_complete = settings.load_weights_end == "complete"
        complete = at_complete or settings.native_complete or committer.poisoned is not None
        request = OpenRequest(
            id=self._id,
            partial=not complete,
            base_epoch=None if complete else committer.live.epoch,
            kv_scales={"policy": "static"}
            if self._provided
            else None,  # until those of the trainer are known
            through_pause=True,
        )
        session = self._updates.open(self._model.manifest(), request)
        session.lifetime = settings.native_update_seconds
        self._failure, self._completed, self._said_complete = None, False, False
        self._scales.clear()
        when = f"a caller marks its end by {_MARKS}"
        when = f"every tensor has come, or {when}" if at_complete else when
        logger.info("fp8ext: load_weights has opened update %s; it is served when %s", session.id, when)
        return session

    def _take_scales(self, scales: dict[str, list[float]]) -> None:
        """Note scales that a call has brought; a tensor that names no layer of this model counts for none."""
        for name, values in scales.items():
            target = layer_scale(name, self._kv.served.scales)
            if target is not None:
                layer, kinds = target
                self._scales.setdefault(layer, {}).update(dict.fromkeys(kinds, values))

    def _is_complete(self, session: Session) -> bool:
        """Tell whether an update ends by completeness; say once if one that is complete waits for its mark."""
        if not session.manifest.tensors.keys() <= session.staged_names():
            return False
        if self._core.settings.load_weights_end == "complete":
            self._completed = True
            return True
        if not self._said_complete:
            self._said_complete = True
            logger.info(
                "fp8ext: every tensor of update %s has come; it waits for %s. A trainer that calls none of these needs the "
                "setting load_weights_end complete",
                *(session.id, _MARKS),
            )
        return False

    def _commit(self) -> None:
        """Prepare and serve the update; engine steps wait for it.

        Raises:
            UpdateError: what refused it.
        """
        session = self._session()
        assert session is not None
        session.check(self._committer.live.epoch)
        if self._provided:
            session.kv_request = self._kv.request({"policy": "provided", "scales": self._scales})
        while isinstance(
            self._finished(Operation.COMMIT, {"id": session.id, "caller": "load_weights"}), Waiting
        ):
            time.sleep(_PAUSE_SECONDS)

    def _finished(self, operation: str, arguments: dict[str, Any]) -> Result:
        """Run an operation to its end, the jobs that it starts too."""
        result = self._handle(operation, arguments)
        job = result.job if isinstance(result, JobStarted) else 0
        seconds = self._core.settings.deadline_seconds
        known, until = Progress(step=0), time.monotonic() + seconds
        while isinstance(result, JobStarted | Progress):
            if isinstance(result, Progress) and (result.step, result.tensors) != (known.step, known.tensors):
                known, until = result, time.monotonic() + seconds
            if time.monotonic() > until:
                message = f"{operation}: nothing was done for {seconds:g} s"
                raise UpdateError("engine-timeout", message, status=504)
            if isinstance(result, Progress) and not result.again:
                time.sleep(_PAUSE_SECONDS)
            result = self._handle(Operation.POLL, {"job": job})
        if isinstance(result, Failure):
            raise result.error
        return result

    def _fail(self, error: UpdateError) -> None:
        self._failure = f"{error.kind}: {error}"
        session = self._session()
        name = f"update {self._id}" if session is not None else "load_weights"
        logger.warning("fp8ext: %s ends, what is served stays: %s", name, shown(self._failure))
        if session is not None and session.alterable:
            self._abandon(session.id)
        self._id, self._completed = uuid.uuid4().hex, False

    def _session(self) -> Session | None:
        session = self._updates.sessions.get(self._id)
        return session if session is not None and session.live else None


def _by_event(loaded: Sequence[Loaded]) -> list[list[LoadEvent]]:
    """Return of each call what every rank tells.

    Raises:
        UpdateError: `rank-mismatch`: ranks were called differently.
    """
    told = [[(e.kind, [name for name, *_ in e.tensors]) for e in each.events] for each in loaded]
    for rank, calls in enumerate(told):
        if calls != told[0]:
            message = (
                f"load_weights: rank {rank} was brought other tensors than rank 0, or others failed there"
            )
            raise UpdateError("rank-mismatch", message, status=500)
    return [list(each) for each in zip(*(each.events for each in loaded), strict=True)]
