# SPDX-License-Identifier: Apache-2.0
"""The update engine: one per engine core, between steps. Sessions in, calls to the ranks out.

Every operation returns at once; what takes long (staging, digests) is a job that the caller polls. An operation never raises:
it returns its result, or `{"error": …}`.
"""

import itertools
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import UpdateError, described
from vllm_fp8ext.weights.digest import read_header
from vllm_fp8ext.weights.labels import Label, default_version
from vllm_fp8ext.weights.manifest import Manifest, merge
from vllm_fp8ext.weights.session import Running, Session, State, refusal

logger = logging.getLogger("vllm.fp8ext")

Result = dict[str, Any]
KEPT_SESSIONS = 16
KEPT_RESULTS = 64


class Core(Protocol):
    """What the update engine needs of an engine core (`compat.engine_core.CoreAccess`)."""

    settings: Settings
    quantization: str | None
    kv_cache_dtype: str

    def ranks(self, method: str, *args: Any) -> list[Result]: ...
    def pause(self) -> float: ...
    def resume(self) -> None: ...
    def paused(self) -> bool: ...
    def label(self, label: Label) -> None: ...
    def enter_epoch(self, epoch: int, *, recompute: bool) -> None: ...


@dataclass(frozen=True)
class Job:
    """Work under way on the ranks' own threads."""

    kind: str
    session: str | None
    chunk: str | None
    epoch: int
    started: float


class UpdateEngine:
    """State of live updates in one engine."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.live = Label(0, default_version(0))
        self.previous: Label | None = None
        """What the twin holds, when it holds complete weights."""
        self.poisoned: str | None = None
        self.sessions: dict[str, Session] = {}
        self.jobs: dict[int, Job] = {}
        self._results: dict[int, list[Result | None]] = {}
        self._done: dict[int, Result] = {}
        self._ids = itertools.count(1)
        self._manifest: Manifest | None = None
        self._cost: Result = {"twin_bytes": [], "twin_kv_blocks": 0}
        self._last: Result | None = None
        self._operations: dict[str, Callable[..., Result]] = {
            "status": self.status,
            "manifest": self.manifest,
            "open": self.open,
            "stage": self.stage,
            "poll": self.poll,
            "update": self.update,
            "prepare": self.prepare,
            "commit": self.commit,
            "abandon": self.abandon,
            "rollback": self.rollback,
            "digests": self.digests,
        }

    @described
    def handle(self, operation: str, arguments: Result) -> Result:
        """Run one operation; errors come back described."""
        return self._operations[operation](**arguments)

    def status(self) -> Result:
        """What is served, and what stands by."""
        if self.core.settings.staging != "none":
            self._known_manifest()
        updating = self._open_session()
        state = "poisoned" if self.poisoned else "updating" if updating else "serving"
        return {
            "epoch": self.live.epoch,
            "version": self.live.version,
            "state": state,
            "poisoned": self.poisoned,
            "update": updating.id if updating else None,
            "previous_version": self.previous.version if self.previous else None,
            "previous_epoch": self.previous.epoch if self.previous else None,
            "scale_format": self.core.settings.scale_format,
            "kv_scales": self.core.settings.kv_scales,
            "kv_cache_dtype": self.core.kv_cache_dtype,
            "staging": self.core.settings.staging,
            **self._cost,
            "last_update": self._last,
        }

    def manifest(self) -> Result:
        """What an update must bring."""
        return self._known_manifest().as_dict()

    def open(
        self,
        version: str | None = None,
        base_epoch: int | None = None,
        running: str = Running.KEEP,
        partial: bool = False,
        id: str | None = None,
    ) -> Result:
        """Open an update. With an `id` that was opened before, that one is returned."""
        manifest = self._known_manifest()
        if id is not None and id in self.sessions:
            return self.sessions[id].as_dict()
        if partial:
            raise UpdateError(
                "unsupported", "partial updates are not supported yet: send every tensor", status=422
            )
        busy = self._open_session()
        if busy is not None:
            raise UpdateError("update-open", f"update {busy.id} is open: one at a time", open=busy.id)
        identifier = id or uuid.uuid4().hex
        label = version if version is not None else default_version(self.live.epoch + 1)
        session = Session(identifier, label, Running(running), manifest, base_epoch)
        session.check_base(self.live.epoch)
        self.sessions[identifier] = session
        for old in list(self.sessions)[:-KEPT_SESSIONS]:
            del self.sessions[old]
        return session.as_dict()

    def stage(self, id: str, chunk: str, path: str) -> Result:
        """Start to stage a safetensors file as one chunk of an update; returns a job."""
        session = self._session(id)
        self._reap()
        specs = read_header(Path(path))
        session.receive(chunk, specs, Path(path).stat().st_size)
        if self.previous is not None or len(session.chunks) == 1:
            self.previous = None
            self._all("begin")
        names = [spec.name for spec in specs if spec.name in session.manifest.tensors]
        return self._start("stage", "stage", path, names, session=session.id, chunk=chunk)

    def poll(self, job: int) -> Result:
        """Progress of a job: `done`, with its result, once every rank is."""
        if job in self._done:
            return {"done": True, **self._done.pop(job)}
        if job not in self.jobs:
            raise UpdateError("unknown-job", f"no job {job}", status=404)
        return self._advance(job)

    def _reap(self) -> None:
        """Take in finished jobs whose caller may have stopped to poll."""
        for job in list(self.jobs):
            result = self._advance(job)
            if result.pop("done"):
                self._done[job] = result
        for job in list(self._done)[:-KEPT_RESULTS]:
            del self._done[job]

    def _advance(self, job: int) -> Result:
        outcomes = self._results[job]
        fresh = self.core.ranks("poll", job)
        tensors = 0
        for rank, result in enumerate(fresh):
            if outcomes[rank] is None and (result.get("done") or "error" in result):
                outcomes[rank] = result
            tensors = max(tensors, result.get("tensors", 0))
        finished = [outcome for outcome in outcomes if outcome is not None]
        if len(finished) < len(outcomes):
            return {"done": False, "tensors": tensors}
        described = self.jobs.pop(job)
        del self._results[job]
        return {"done": True, **self._finish(described, finished)}

    def update(self, id: str) -> Result:
        """Where an update stands."""
        return self._session(id).as_dict()

    def prepare(self, id: str) -> Result:
        """Validate an update as a whole."""
        session = self._session(id)
        self._reap()
        start = time.perf_counter()
        session.prepare(self.live.epoch)
        session.seconds.setdefault("prepare", time.perf_counter() - start)
        return session.as_dict()

    def commit(self, id: str) -> Result:
        """Serve an update's weights from the next step on. Prepares it if nobody did. Idempotent."""
        session = self._session(id)
        if session.state is State.COMMITTED:
            return session.as_dict()
        self.prepare(id)
        label = Label(self.live.epoch + 1, session.version)
        try:
            phases = self._exchange(label, session.running)
        except UpdateError:
            if self.poisoned:
                session.forget()
            raise
        session.seconds.update(phases)
        session.seconds["total"] = time.time() - session.opened_at
        session.commit({"epoch": label.epoch, "version": label.version, "pause_seconds": phases["pause"]})
        self._last = {
            "id": session.id,
            "bytes": session.as_dict()["bytes"],
            "seconds": dict(session.seconds),
            "quantization_error": session.quantization_error,
        }
        return session.as_dict()

    def abandon(self, id: str) -> Result:
        """Give an update up; the served weights are as they were."""
        session = self._session(id)
        session.abandon()
        return session.as_dict()

    def rollback(self, running: str = Running.KEEP) -> Result:
        """Serve the previous weights again, as a new epoch."""
        self._known_manifest()
        if self.previous is None:
            raise UpdateError(
                "no-previous", "no previous weights: no update was committed, or a newer one was begun"
            )
        label = Label(self.live.epoch + 1, self.previous.version)
        phases = self._exchange(label, Running(running))
        return {"epoch": label.epoch, "version": label.version, "seconds": phases}

    def digests(self) -> Result:
        """Start to compute the digests of the served weights; returns a job."""
        self._known_manifest()
        return self._start("digests", "digests")

    def _exchange(self, label: Label, running: Running) -> dict[str, float]:
        """The commit proper, on a step boundary: all ranks or none. Returns the seconds of each phase."""
        if self.poisoned is None and self.core.paused():
            raise UpdateError("paused", "the engine is paused or asleep: resume it first")
        start = time.perf_counter()
        drain = self.core.pause()
        exchanged = time.perf_counter()
        healing = self.poisoned is not None
        self._swap_all()
        caches = time.perf_counter()
        self.previous, self.live = None if healing else self.live, label
        try:
            self.core.enter_epoch(label.epoch, recompute=healing or running is Running.RECOMPUTE)
            self.core.label(label)
        except Exception as error:
            self._poison(f"the caches could not be separated from the old weights: {error}")
        self.core.resume()
        end = time.perf_counter()
        logger.info(
            "fp8ext: epoch %d (version %s) is served; paused for %.1f ms", *label, (end - start) * 1e3
        )
        return {"drain": drain, "exchange": caches - exchanged, "caches": end - caches, "pause": end - start}

    def _swap_all(self) -> None:
        """Exchange on every rank. When some fail (each undoes its own part), the others swap back; if that fails too, no
        rank can be trusted and the engine is poisoned: it stays paused until a full update heals it."""
        results = self.core.ranks("exchange")
        failures = [result for result in results if "error" in result]
        if not failures:
            self.poisoned = None
            return
        error = UpdateError.from_dict(failures[0]["error"])
        swapped = [rank for rank, result in enumerate(results) if "error" not in result]
        undone = self.core.ranks("exchange", swapped) if swapped else []
        if any(result["broken"] for result in failures) or any("error" in result for result in undone):
            self._poison(str(error))
        if self.poisoned is None:
            self.core.resume()
        raise error

    def _poison(self, reason: str) -> NoReturn:
        """Nobody knows what is served: stay paused until a full update has been staged and committed."""
        self.poisoned, self.previous = reason, None
        raise UpdateError("poisoned", f"the commit failed half-way: {reason}", status=500)

    def _start(
        self, kind: str, method: str, *args: Any, session: str | None = None, chunk: str | None = None
    ) -> Result:
        job = next(self._ids)
        started = self._all(method, job, *args)
        self.jobs[job] = Job(kind, session, chunk, self.live.epoch, time.perf_counter())
        self._results[job] = [None] * len(started)
        return {"job": job}

    def _finish(self, job: Job, results: list[Result]) -> Result:
        errors = [result["error"] for result in results if "error" in result]
        if job.kind == "digests":
            if errors:
                raise UpdateError.from_dict(errors[0])
            if job.epoch != self.live.epoch:
                return {"stale": True}
            names: dict[str, dict[str, str]] = {}
            for result in results:
                for name, value in result["digests"].items():
                    names.setdefault(name, {})[str(result["rank"])] = value
            addresses = [result["addresses"] for result in results]
            return {
                "epoch": job.epoch,
                "version": self.live.version,
                "digests": dict(sorted(names.items())),
                "addresses": addresses,
            }
        session = self.sessions.get(job.session or "")
        if session is None:
            return {"error": UpdateError("unknown-update", f"no update {job.session}", status=404).as_dict()}
        problems = _distinct([problem for result in results for problem in result.get("problems", ())])
        faults = [{"kind": error["kind"], "detail": error["message"]} for error in errors]
        session.staged(job.chunk or "", problems + faults)
        session.seconds["staging"] = session.seconds.get("staging", 0.0) + time.perf_counter() - job.started
        session.squared_error += sum(result.get("squared_error", 0.0) for result in results)
        session.squared_norm += sum(result.get("squared_norm", 0.0) for result in results)
        if errors:
            return {"error": errors[0]}
        if problems:
            return {"error": refusal(problems).as_dict()}
        return {"update": session.as_dict()}

    def _all(self, method: str, *args: Any) -> list[Result]:
        """Call every rank; the first error of any is raised."""
        results = self.core.ranks(method, *args)
        for result in results:
            if "error" in result:
                raise UpdateError.from_dict(result["error"])
        return results

    def _known_manifest(self) -> Manifest:
        if self._manifest is None:
            if self.core.quantization != "blockfp8":
                raise UpdateError(
                    "updates-unavailable", "this server was not started with --quantization blockfp8"
                )
            parts = self._all("describe")
            self._manifest = merge(Manifest.from_dict(part["manifest"]) for part in parts)
            self._cost = {
                "twin_bytes": [part["twin_bytes"] for part in parts],
                "twin_kv_blocks": parts[0]["twin_kv_blocks"],
            }
        return self._manifest

    def _session(self, id: str) -> Session:
        session = self.sessions.get(id)
        if session is None:
            raise UpdateError("unknown-update", f"no update {id}", status=404)
        return session

    def _open_session(self) -> Session | None:
        return next((session for session in self.sessions.values() if session.live), None)


def _distinct(problems: list[Result]) -> list[Result]:
    """Problems of all ranks, each tensor once."""
    seen = {(problem["kind"], problem["tensor"]): problem for problem in problems}
    return [{key: value for key, value in problem.items() if key != "rank"} for problem in seen.values()]
