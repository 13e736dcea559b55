# SPDX-License-Identifier: Apache-2.0
"""What one worker process does for an update. Methods never raise: they return plain results or a described error.

Staging runs on a thread of its own, one job after the other, so that engine steps go on, and so do digests on another. The
canary (unless it was recorded) runs on the worker's main thread, between steps, and so does the exchange, or takes its turn
there on a GPU.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_fp8ext.errors import Failure, UpdateError, errors_as_results
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.rank_results import (
    Accepted,
    CanaryScore,
    Fingerprint,
    RankDescription,
    RankDigests,
    RankProgress,
    RankResult,
    SwapTime,
)
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.registry import source_from_dict
from vllm_fp8ext.update.worker.canary_graph import CanaryGraph
from vllm_fp8ext.update.worker.cooperative_task import Pause, Slices
from vllm_fp8ext.update.worker.digest import combine, digest
from vllm_fp8ext.update.worker.intake import Intake
from vllm_fp8ext.update.worker.kv_scales import RankKv
from vllm_fp8ext.update.worker.score_prompts import Attend, recite
from vllm_fp8ext.update.worker.shadow import Shadow
from vllm_fp8ext.update.worker.stopwatch import Stopwatch
from vllm_fp8ext.update.worker.worker_threads import Lanes

_REHEARSAL = 0
"""A job that no update has: theirs count from 1."""


class _Told:
    """Tensors as they are told: the same ones come with every update, thousands of experts."""

    def __init__(self) -> None:
        self._last: tuple[Any, list[TensorSpec]] = None, []
        self._specs: dict[tuple[str, tuple[int, ...], str], TensorSpec] = {}

    def stored(self, tensors: list[Any]) -> list[StoredTensor]:
        """Of `[name, shape, dtype, start, bytes]` each. The same specification is always the same object."""
        if not tensors:
            return []
        names, shapes, dtypes, starts, sizes = zip(*tensors, strict=True)
        if self._last[0] != (names, shapes, dtypes):
            told = zip(names, map(tuple, shapes), dtypes, strict=True)
            specs = [
                self._specs.get(spec) or self._specs.setdefault(spec, TensorSpec(*spec)) for spec in told
            ]
            self._last = (names, shapes, dtypes), specs
        return list(map(StoredTensor, self._last[1], starts, sizes))


class Rank:
    """One rank's twin and its threads. `kv_blocks`: what the twin costs; `attend`: see `recital.recite`; `kv`: its FP8 KV
    cache."""

    def __init__(
        self,
        twin: Shadow,
        rank: int,
        world_size: int,
        kv_blocks: int,
        attend: Attend,
        kv: RankKv | None = None,
    ) -> None:
        self.twin = twin
        self.kv = kv
        self.rank = rank
        self.world_size = world_size
        self.kv_blocks = kv_blocks
        self._attend = attend
        self._device = twin.exchange.pairs[0][0].device
        self._told = _Told()
        self._intake = Intake(twin, rank, world_size, self._device)
        self._lanes = Lanes(self._device)
        self._exchanging = Stopwatch(self._device)
        self._recitals: dict[int, Slices] = {}
        self._recording: CanaryGraph | None = None

    @errors_as_results
    def describe(self) -> RankDescription:
        """This rank's manifest, and what its twin costs."""
        return RankDescription(
            manifest=self.twin.manifest,
            fingerprint=self._fingerprint(twin=False),
            shadow_bytes=self.twin.exchange.bytes,
            shadow_kv_blocks=self.kv_blocks,
        )

    @errors_as_results
    def stage(
        self,
        job: int,
        session: str,
        source: dict[str, Any],
        tensors: list[Any],
        hashes: dict[str, Any],
        rate: float = 0.0,
        tied: Sequence[str] = (),
    ) -> Accepted:
        """Start to stage these tensors (`[name, shape, dtype, start, bytes]`) of a `Source`; `poll(job)` tells the outcome.

        `hashes`: by the name of what was sent, the SHA-256 that its raw bytes must have, and which of these tensors it
        is; each rank checks its share. `rate`, `tied`: as in `Intake.stage`.
        """
        found, intake = source_from_dict(source), self._intake
        intake.want(session)

        def stage() -> RankResult:
            return intake.stage(job, session, found, self._told.stored(tensors), hashes, rate, tied)

        return self._lanes.start("staging", job, stage, intake.tidy)

    @errors_as_results
    def drop(self, session: str) -> Accepted:
        """Give up what is still to be staged of an update."""
        self._intake.drop(session)
        return Accepted()

    @errors_as_results
    def keep_others(self, job: int, session: str, names: list[str]) -> Accepted:
        """Start to give the twin the served weights wherever these tensors of an update lie not."""
        return self._lanes.start("staging", job, lambda: self._intake.keep_others(session, names))

    @errors_as_results
    def rehearse(self, prompts: list[list[int]], built_in: bool) -> RankResult:
        """Stage something that is thrown away, and run prompts through the twin, whatever it holds: nothing compiles later,
        while requests run."""

        def stage() -> RankResult:
            self._intake.rehearse()
            return Accepted()

        self._lanes.start("staging", _REHEARSAL, stage)
        staged = self._lanes.take(_REHEARSAL, None)
        recite(self.twin.model, prompts, self._device, self._attend, lambda: None)
        if self.kv is not None:
            self.kv.warm_up()
        if built_in and self._device.type == "cuda" and self.world_size == 1:
            self._recording = CanaryGraph(self.twin.model, prompts[0], self._device, self._attend)
        return staged or Accepted()

    @errors_as_results
    def mark(self, job: int, built_in: bool) -> Accepted:
        """Start to compute the fingerprint of the twin's contents, and how long that takes. Where the built-in canary was
        recorded, and is asked for, it sings in the same job, since it needs nothing of this thread: of it only `finite`
        matters, and that is all there is."""
        recording = self._recording if built_in else None
        if recording is not None:
            self._end_recital()

        def work() -> Fingerprint:
            start = time.perf_counter()
            value = self._fingerprint(twin=True)
            seconds = time.perf_counter() - start
            canary = CanaryScore(finite=recording.finite()) if recording is not None else None
            return Fingerprint(fingerprint=value, seconds=seconds, canary=canary)

        return self._lanes.start("staging", job, work)

    @errors_as_results
    def sing(self, job: int, prompts: list[list[int]]) -> Accepted:
        """Start to run prompts through the twin; each `poll(job)` runs one slice of it."""
        model, device, attend = self.twin.model, self._device, self._attend
        return self._in_slices(job, lambda pause: recite(model, prompts, device, attend, pause))

    @errors_as_results
    def observe(self, job: int, prompts: list[list[int]]) -> Accepted:
        """Start to run prompts through the twin and see its queries, keys and values; each `poll(job)` runs one slice."""
        if self.kv is None:
            raise UpdateError("no-kv-scales", "the KV cache is not FP8", status=404)
        return self._in_slices(job, self.kv.listening(self.twin.model, self._device, self._attend, prompts))

    def _in_slices(self, job: int, work: Callable[[Pause], RankResult]) -> Accepted:
        on_gpu = self._device.type == "cuda"
        # several ranks' collectives go through buffers that the stream of the steps orders
        stream = torch.cuda.current_stream(self._device) if on_gpu and self.world_size > 1 else None

        def on_device(pause: Pause) -> RankResult:
            if on_gpu:
                torch.cuda.set_device(self._device)  # of this thread: a new one is on the first
            if stream is not None:
                torch.cuda.set_stream(stream)
            return work(pause)

        self._end_recital()
        self._recitals = {job: Slices(on_device)}
        return Accepted()

    def _end_recital(self) -> None:
        """The twin has one at a time: who still asks for an older one learns of its end."""
        for job, stale in self._recitals.items():
            stale.close()
            ended = UpdateError("wrong-state", "another update was prepared meanwhile, or this one again")
            self._lanes.tell(job, Failure.of(ended))
        self._recitals = {}

    @errors_as_results
    def digests(self, job: int) -> Accepted:
        """Start to compute this rank's digests of the live weights, and a SHA-256 over the path and storage
        address of each: the same as long as none has moved."""
        return self._lanes.start("digests", job, self._digests)

    @errors_as_results
    def fingerprint(self, job: int) -> Accepted:
        """Start to compute the fingerprint of the live contents."""

        def work() -> Fingerprint:
            return Fingerprint(fingerprint=self._fingerprint(twin=False))

        return self._lanes.start("fingerprint", job, work)

    @errors_as_results
    def poll(self, job: int, patience: float) -> RankResult:
        """Return the job's result, once, or `RankProgress`. Waits `patience` seconds for the result."""
        recital = self._recitals.pop(job, None)
        if recital is not None:
            if not recital.advance():
                self._recitals[job] = recital
                return RankProgress(tensors=recital.done, again=True)
            return recital.result or Accepted()
        result = self._lanes.take(job, patience)
        if result is None:
            return RankProgress(tensors=self._intake.progress.get(job, 0))
        self._intake.progress.pop(job, None)
        return result

    @errors_as_results
    def exchange(self, only: list[int] | None = None) -> Accepted | Failure:
        """Swap live and twin contents, unless other ranks are named. A failure is undone; where that failed too, it is not
        `unchanged`. On a GPU this queues it between the steps before and after: `settle` tells when it is done."""
        if only is not None and self.rank not in only:
            return Accepted()
        try:
            with torch.inference_mode(), self._exchanging:
                self.twin.commit()
                if self.kv is not None:
                    self._exchange_scales(self.kv)
        except Exception as error:
            failure = UpdateError("exchange-failed", f"rank {self.rank}: {error}", status=500)
            return Failure.of(failure, unchanged=not self.twin.exchange.broken)
        return Accepted()

    @errors_as_results
    def settle(self) -> SwapTime:
        """Wait until the exchange is done, or undone: others than the engine's steps may look at live and twin then."""
        return SwapTime(seconds=self._exchanging.wait())

    def _exchange_scales(self, kv: RankKv) -> None:
        """Beside weights that were exchanged already, and are again when this fails."""
        exchange = self.twin.exchange
        try:
            kv.scales.exchange()
        except BaseException:
            self.twin.commit()
            exchange.broken = exchange.broken or exchange.inplace or kv.scales.broken
            raise

    @errors_as_results
    def finish(self) -> Accepted:
        """Close what chunks have left open: a trainer's memory becomes free with that."""
        self._lanes.finish()
        return Accepted()

    @errors_as_results
    def keep_constants(self) -> Accepted:
        """Memory is about to lose its contents (`Shadow.keep_constants`)."""
        self.twin.keep_constants()
        return Accepted()

    @errors_as_results
    def refresh(self) -> Accepted:
        """Memory came back without its contents (`Shadow.refresh`)."""
        with torch.inference_mode():
            self.twin.refresh()
            if self.kv is not None:
                self.kv.refresh()
        return Accepted()

    def _fingerprint(self, *, twin: bool) -> int:
        with torch.inference_mode():
            found = self.twin.exchange.fingerprint(shadow=twin)
            scales = self.kv.scales.fingerprint(twin=twin) if self.kv is not None else 0
        return found ^ scales << 64 if scales else found

    def _digests(self) -> RankDigests:
        listed = "\n".join(f"{path} {address}" for path, address in self.twin.addresses().items())
        found = {}
        for name, pieces in self.twin.manifest.pieces.items():
            found[name] = combine([digest(piece, *self.twin.served(piece.target)) for piece in pieces])
        addresses = hashlib.sha256(listed.encode()).hexdigest()
        scales = self.kv.scales.served() if self.kv is not None else {}
        return RankDigests(rank=self.rank, digests=found, addresses=addresses, kv_scales=scales)
