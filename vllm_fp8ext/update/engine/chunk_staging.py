# SPDX-License-Identifier: Apache-2.0
"""Staging of chunks: tensors of an update that came together go to the ranks, and their verdicts into the session."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_fp8ext.update.contract.fused import taken_apart
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import StagedTensors, distinct, failures, summed
from vllm_fp8ext.update.contract.results import JobStarted, Result, UpdateState
from vllm_fp8ext.update.contract.tensor_slices import tensor_of
from vllm_fp8ext.update.contract.update_errors import refusal
from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.jobs import Flow, Jobs, OnRanks
from vllm_fp8ext.update.engine.session import Session
from vllm_fp8ext.update.engine.timestamp import Moment


class ChunkStaging:
    """Stages chunks beside requests, or in place while the engine stands still."""

    def __init__(self, core: Core, jobs: Jobs, committer: Committer, clock: Callable[[], Moment]) -> None:
        self._core = core
        self._jobs = jobs
        self._committer = committer
        self._clock = clock
        self._inplace = core.settings.staging == "inplace"

    def start(
        self,
        session: Session,
        chunk: str,
        source: dict[str, Any],
        tensors: list[Any],
        size: int,
        sha256: str | None,
    ) -> Result:
        """Start to stage a chunk (`UpdateEngine.stage`)."""
        call, seconds = self.prepare(session, chunk, source, tensors, size, sha256)
        started = self._jobs.start(self.run(session, chunk, call))
        return replace(started, soonest=seconds) if isinstance(started, JobStarted) else started

    def prepare(
        self,
        session: Session,
        chunk: str,
        source: dict[str, Any],
        tensors: list[Any],
        size: int,
        sha256: str | None = None,
    ) -> tuple[OnRanks, float]:
        """Enter a chunk in its session; returns the call that stages it, and in how many seconds at the earliest.

        Raises:
            UpdateError: what `Session.receive` refuses, or an engine that takes no chunk now.
        """
        self._committer.require_healing(session.partial)
        self._jobs.reap()
        if self._inplace:
            self._committer.require_running()
            self._committer.require_recomputable(session.running, session.cached)
        manifest = session.manifest
        tensors, sent_names = _canonical(tensors, manifest)
        specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype, *_ in tensors]
        session.receive(chunk, specs, size, sha256, sent_names)
        session.touch(self._clock())
        self._committer.lose_previous()
        names = manifest.tensors.keys() | manifest.fused.keys() | manifest.tied.keys()
        names |= manifest.scales_among(specs).keys()
        used = [tensor for tensor in tensors if tensor[0] in names or tensor_of(tensor[0]) in names]
        if self._inplace and used:
            self._committer.hold(session.running)
        rate = self._rate()
        call = OnRanks(
            RankMethod.STAGE,
            *(session.id, source, taken_apart(used, manifest.fused), _hashes(session, used), rate),
            session.tied_in_others(chunk),
            session.sparse,
        )
        used_bytes = sum(tensor[4] for tensor in used)
        return call, used_bytes / (rate * manifest.world_size) if rate else 0.0

    def _rate(self) -> float:
        """Return the most bytes a second that a rank may stage; 0: any."""
        beside_requests = self._core.unfinished() > 0 and not self._inplace
        return self._core.settings.busy_staging_rate if beside_requests else 0.0

    def run(self, session: Session, chunk: str, call: OnRanks) -> Flow[UpdateState]:
        """Stage a chunk that was prepared; ends with the state of its update."""
        started = time.perf_counter()
        results = yield call
        failed = failures(results)
        staged = [result for result in results if isinstance(result, StagedTensors)]
        problems = distinct([problem for result in staged for problem in result.problems])
        reasons = dict.fromkeys((failure.kind, failure.message) for failure in failed)
        faults = [{"kind": kind, "detail": message} for kind, message in reasons]
        session.staged(chunk, problems + faults, summed(staged))
        if len(failed) < len(results) or not all(failure.unchanged for failure in failed):
            self._committer.wrote()
        session.touch(self._clock())
        session.took_staging(started, time.perf_counter())
        if failed:
            raise failed[0].error
        if problems:
            raise refusal(problems)
        return session.describe()


def _hashes(session: Session, tensors: list[Any]) -> dict[str, list[Any]]:
    """Return claimed SHA-256s and the tensors that each covers, by the name that was sent."""
    claimed = {name: claim.sha256 for name, claim in session.claims.items() if claim.sha256}
    manifest = session.manifest
    return {name: [claimed[name], manifest.parts([name])] for name, *_ in tensors if name in claimed}


def _canonical(tensors: list[Any], manifest: Manifest) -> tuple[list[Any], dict[str, str]]:
    """Rename tensors, each a list that begins with its name, as the manifest does; returns also the names that were sent."""
    if not manifest.aliases:
        return tensors, {}
    known = [manifest.canonical(name) for name, *_ in tensors]
    sent = {name: tensor[0] for name, tensor in zip(known, tensors, strict=True) if name != tensor[0]}
    return [[name, *tensor[1:]] for name, tensor in zip(known, tensors, strict=True)], sent
