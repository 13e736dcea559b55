# SPDX-License-Identifier: Apache-2.0
"""One worker process's part of an update. Methods never raise: they return results, or the error as one.

Staging runs on a thread of its own, one job after the other, so that engine steps go on, and so do digests on another. The
canary (unless it was captured as a graph) runs on the worker's main thread, between steps, and so does the swap; on a GPU the
swap takes its turn there.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_fp8ext.errors import Failure, UpdateError, errors_as_results
from vllm_fp8ext.update.contract.canary import POOLING, no_prompts
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
from vllm_fp8ext.update.transports.registry import source_from_dict
from vllm_fp8ext.update.worker.canary_graph import CanaryGraph
from vllm_fp8ext.update.worker.cooperative_task import CooperativeTask, Pause
from vllm_fp8ext.update.worker.digest import combine, digest
from vllm_fp8ext.update.worker.finite_tensors import finite_tensors
from vllm_fp8ext.update.worker.intake import Intake
from vllm_fp8ext.update.worker.kv_scales import RankKv
from vllm_fp8ext.update.worker.loads import Loads
from vllm_fp8ext.update.worker.score_prompts import AttachAttention, score_prompts
from vllm_fp8ext.update.worker.shadow import Shadow
from vllm_fp8ext.update.worker.spec_cache import SpecCache
from vllm_fp8ext.update.worker.stopwatch import Stopwatch
from vllm_fp8ext.update.worker.worker_threads import WorkerThreads

_WARM_UP_JOB = 0
"""Number of a job that no update has: theirs count from 1."""


class Rank:
    """The shadow of one rank, and its threads.

    `rank`: its number among the ranks of all `cores`; `world_size`: ranks of its own core, which meet in collectives.
    `kv_blocks`: KV-cache blocks that the shadow costs. `attach_attention`: as of `score_prompts`. `kv`: the FP8 KV cache.
    `untried`: kinds of layers that have no forward of the shadow's; with some, prompts are not run: tensors must be finite.
    `pooling`: the model has no logits; its hidden states must be finite.
    """

    def __init__(
        self,
        shadow: Shadow,
        rank: int,
        world_size: int,
        kv_blocks: int,
        attach_attention: AttachAttention,
        kv: RankKv | None = None,
        untried: Sequence[str] = (),
        *,
        pooling: bool = False,
        cores: int = 1,
    ) -> None:
        self.shadow = shadow
        self._untried = tuple(untried)
        self._pooling = pooling
        self.kv = kv
        self.rank = rank
        self.world_size = world_size
        self.kv_blocks = kv_blocks
        self._attach_attention = attach_attention
        self._device = shadow.weight_swap.pairs[0][0].device
        self._specs = SpecCache()
        self._intake = Intake(shadow, rank, cores * world_size, self._device)
        self._threads = WorkerThreads(self._device)
        self.loads = Loads(shadow, self._intake, self._threads, self._device)
        self._swap_time = Stopwatch(self._device)
        self._tasks: dict[int, CooperativeTask] = {}
        self._canary_graph: CanaryGraph | None = None

    @errors_as_results
    def describe(self) -> RankDescription:
        """Return this rank's manifest, and the memory that its shadow takes."""
        return RankDescription(
            manifest=self.shadow.manifest,
            fingerprint=self._fingerprint(shadow=False),
            shadow_bytes=self.shadow.weight_swap.bytes,
            shadow_kv_blocks=self.kv_blocks,
            untried=self._untried or (POOLING,) * self._pooling,
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
        sparse: bool = False,
    ) -> Accepted:
        """Start to stage tensors (`[name, shape, dtype, start, bytes]`) of a `Source`; `poll(job)` returns the outcome.

        `hashes`: by the name of what was sent, the SHA-256 that its raw bytes must have, and which of these tensors it
        is; each rank checks its share. `rate`, `tied`, `sparse`: as in `Intake.stage`.
        """
        opened, intake = source_from_dict(source), self._intake
        intake.want(session)

        def stage() -> RankResult:
            return intake.stage(job, session, opened, self._specs.stored(tensors), hashes, rate, tied, sparse)

        return self._threads.start("staging", job, stage, intake.close_deferred)

    @errors_as_results
    def drop(self, session: str) -> Accepted:
        """Give up what is still to be staged of an update."""
        self._intake.drop(session)
        return Accepted()

    @errors_as_results
    def copy_unsent(self, job: int, session: str, names: list[str]) -> Accepted:
        """Start to copy served weights into the shadow wherever no tensor of these writes."""
        return self._threads.start("staging", job, lambda: self._intake.copy_unsent(session, names))

    @errors_as_results
    def warm_up(self, prompts: list[list[int]], built_in: bool) -> RankResult:
        """Stage throw-away tensors, and run prompts through the shadow: nothing compiles later, while requests run."""

        def stage() -> RankResult:
            self._intake.warm_up()
            return Accepted()

        self._threads.start("staging", _WARM_UP_JOB, stage)
        staged = self._threads.take_result(_WARM_UP_JOB, None)
        if not self._untried:
            self._score(prompts, lambda: None)
        if self.kv is not None:
            self.kv.warm_up()
        if built_in and not self._untried and self._device.type == "cuda" and self.world_size == 1:
            self._canary_graph = CanaryGraph(
                self.shadow.model,
                prompts[0],
                self._device,
                self._attach_attention,
                has_logits=not self._pooling,
            )
        return staged or Accepted()

    @errors_as_results
    def fingerprint_shadow(self, job: int, built_in: bool) -> Accepted:
        """Start to compute the fingerprint of the shadow's contents.

        With the built-in canary its graph, where there is one, runs in the same job, since it needs nothing of this thread.
        It tells `finite` alone: nothing else of it counts.
        """
        graph = self._canary_graph if built_in else None
        if graph is not None:
            self._end_tasks()

        def work() -> Fingerprint:
            start = time.perf_counter()
            value = self._fingerprint(shadow=True)
            seconds = time.perf_counter() - start
            if graph is not None:
                self._derive_shadow()
            canary = CanaryScore(finite=graph.finite()) if graph is not None else None
            return Fingerprint(fingerprint=value, seconds=seconds, canary=canary)

        return self._threads.start("staging", job, work)

    @errors_as_results
    def run_canary(self, job: int, prompts: list[list[int]]) -> Accepted:
        """Start to run prompts through the shadow, or to look whether its tensors are finite.

        Each `poll(job)` runs one slice.
        """
        if self._untried:
            tensors = [shadow for _, shadow in self.shadow.weight_swap.pairs]
            return self._start_task(job, lambda pause: finite_tensors(tensors, pause))
        return self._start_task(job, lambda pause: self._score(prompts, pause))

    def _score(self, prompts: list[list[int]], pause: Pause) -> CanaryScore:
        model, logits = self.shadow.model, not self._pooling
        return score_prompts(model, prompts, self._device, self._attach_attention, pause, has_logits=logits)

    @errors_as_results
    def observe_kv(self, job: int, prompts: list[list[int]]) -> Accepted:
        """Start to run prompts through the shadow and observe its queries, keys and values.

        Each `poll(job)` runs one slice.
        """
        if self.kv is None:
            raise UpdateError("no-kv-scales", "the KV cache is not FP8", status=404)
        if self._untried:
            raise UpdateError("canary-unavailable", no_prompts(self._untried), status=422)
        task = self.kv.observation(self.shadow.model, self._device, self._attach_attention, prompts)
        return self._start_task(job, task)

    def _start_task(self, job: int, work: Callable[[Pause], RankResult]) -> Accepted:
        on_gpu = self._device.type == "cuda"
        # several ranks' collectives go through buffers that the stream of the steps orders
        stream = torch.cuda.current_stream(self._device) if on_gpu and self.world_size > 1 else None

        def on_device(pause: Pause) -> RankResult:
            if on_gpu:
                torch.cuda.set_device(self._device)  # of this thread: a new one is on the first
            if stream is not None:
                torch.cuda.set_stream(stream)
            self._derive_shadow()
            return work(pause)

        self._end_tasks()
        self._tasks = {job: CooperativeTask(on_device)}
        return Accepted()

    def _derive_shadow(self) -> None:
        with torch.inference_mode():
            self.shadow.derive()

    def _end_tasks(self) -> None:
        """End the shadow's task, of which it has one at a time: who still polls it gets an error."""
        for job, stale in self._tasks.items():
            stale.close()
            ended = UpdateError("wrong-state", "another update was prepared meanwhile, or this one again")
            self._threads.set_result(job, Failure.of(ended))
        self._tasks = {}

    @errors_as_results
    def digests(self, job: int) -> Accepted:
        """Start to compute this rank's digests of the live weights.

        With them comes a SHA-256 over the path and storage address of each: the same as long as none has moved.
        """
        return self._threads.start("digests", job, self._digests)

    @errors_as_results
    def fingerprint(self, job: int) -> Accepted:
        """Start to compute the fingerprint of the live contents."""

        def work() -> Fingerprint:
            return Fingerprint(fingerprint=self._fingerprint(shadow=False))

        return self._threads.start("fingerprint", job, work)

    @errors_as_results
    def poll(self, job: int, patience: float) -> RankResult:
        """Return the job's result, once, or `RankProgress`. Waits `patience` seconds for the result."""
        task = self._tasks.pop(job, None)
        if task is not None:
            if not task.advance():
                self._tasks[job] = task
                return RankProgress(tensors=task.slices, again=True)
            return task.result or Accepted()
        result = self._threads.take_result(job, patience)
        if result is None:
            return RankProgress(tensors=self._intake.progress.get(job, 0))
        self._intake.progress.pop(job, None)
        return result

    @errors_as_results
    def swap(self, only: list[int] | None = None) -> Accepted | Failure:
        """Swap live and shadow contents, unless other ranks are named.

        A failure is undone; where that failed too, it is not `unchanged`. On a GPU this queues the swap between the steps
        before and after: `wait_for_swap` returns when it is done.
        """
        if only is not None and self.rank not in only:
            return Accepted()
        try:
            with torch.inference_mode(), self._swap_time:
                self.shadow.swap()
                if self.kv is not None:
                    self._swap_scales(self.kv)
        except Exception as error:
            failure = UpdateError("exchange-failed", f"rank {self.rank}: {error}", status=500)
            return Failure.of(failure, unchanged=not self.shadow.weight_swap.broken)
        return Accepted()

    @errors_as_results
    def wait_for_swap(self) -> SwapTime:
        """Wait until the swap is done, or undone. Then others than the engine's steps may look at live and shadow."""
        return SwapTime(seconds=self._swap_time.wait())

    def _swap_scales(self, kv: RankKv) -> None:
        """Swap scales, beside weights that were swapped already; swap these back when it fails."""
        weight_swap = self.shadow.weight_swap
        try:
            kv.scales.swap()
        except BaseException:
            self.shadow.swap()
            weight_swap.broken = weight_swap.broken or weight_swap.inplace or kv.scales.broken
            raise

    @errors_as_results
    def close_sources(self) -> Accepted:
        """Close what chunks have left open: a trainer's memory becomes free with that."""
        self._threads.run_cleanups()
        self._intake.close_shared()
        return Accepted()

    @errors_as_results
    def save_constants(self) -> Accepted:
        """Save constants of the model, whose memory is about to lose its contents (`Shadow.save_constants`)."""
        self.shadow.save_constants()
        return Accepted()

    @errors_as_results
    def restore(self) -> Accepted:
        """Restore memory that lost its contents (`Shadow.restore`)."""
        with torch.inference_mode():
            self.shadow.restore()
            if self.kv is not None:
                self.kv.restore()
        return Accepted()

    def _fingerprint(self, *, shadow: bool) -> int:
        with torch.inference_mode():
            weights = self.shadow.weight_swap.fingerprint(shadow=shadow)
            scales = self.kv.scales.fingerprint(shadow=shadow) if self.kv is not None else 0
        return weights ^ scales << 64 if scales else weights

    def _digests(self) -> RankDigests:
        listed = "\n".join(f"{path} {address}" for path, address in self.shadow.addresses().items())
        digests = {
            name: combine([digest(piece, *self.shadow.served(piece.target)) for piece in pieces])
            for name, pieces in self.shadow.manifest.pieces.items()
        }
        addresses = hashlib.sha256(listed.encode()).hexdigest()
        scales = self.kv.scales.served() if self.kv is not None else {}
        return RankDigests(rank=self.rank, digests=digests, addresses=addresses, kv_scales=scales)
