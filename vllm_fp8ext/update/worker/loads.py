# SPDX-License-Identifier: Apache-2.0
"""Stages what trainers bring by calling `load_weights` on the served model, in one rank.

The engine tells beforehand whether tensors may come, and for which update. It asks afterwards what came. Whatever is wrong is
kept until then, not raised: a sender that waits for the end of its call would wait for ever.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.errors import Failure, ForeignLoadError, UpdateError
from vllm_fp8ext.update.contract.dtype_name import dtype_name
from vllm_fp8ext.update.contract.fused import taken_apart
from vllm_fp8ext.update.contract.kv_names import is_kv_scale
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, SCALES, Manifest, TensorSpec, scale_name
from vllm_fp8ext.update.contract.rank_results import Accepted, Loaded, LoadEvent, LoadKind, StagedTensors
from vllm_fp8ext.update.transports.memory import TensorMemory
from vllm_fp8ext.update.worker.intake import Intake
from vllm_fp8ext.update.worker.shadow import Shadow
from vllm_fp8ext.update.worker.spec_cache import SpecCache
from vllm_fp8ext.update.worker.stalled_call import StalledCall
from vllm_fp8ext.update.worker.worker_threads import WorkerThreads

BATCH_BYTES = 256 << 20
"""Bytes of tensors that are staged together, unless a single one is larger."""

Named = tuple[str, Tensor]
Around = Callable[[], AbstractContextManager[None]]


@dataclass
class _Call:
    """Tensors that one `load_weights` has brought, and what became of them."""

    tensors: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    bytes: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    failure: Failure | None = None
    parts: set[str] = field(default_factory=set)
    kv_scales: dict[str, list[float]] = field(default_factory=dict)

    def event(self) -> LoadEvent:
        staged = self.failure or StagedTensors(problems=self.problems, errors=self.errors)
        return LoadEvent(
            kind=LoadKind.TENSORS,
            call="load_weights",
            tensors=self.tensors,
            bytes=self.bytes,
            staged=staged,
            kv_scales=self.kv_scales,
        )


class Loads:
    """Calls on the served model of one rank, between two questions of the engine.

    `around`: entered around each call, where the engine lives in this process and may not have been asked to make it.
    `may_end`: whether this process is the engine's or a worker's own, which may end; not where it is the trainer's.
    """

    def __init__(self, shadow: Shadow, intake: Intake, threads: WorkerThreads, device: torch.device) -> None:
        self.around: Around = nullcontext
        self.may_end = True
        self._shadow = shadow
        self._intake = intake
        self._threads = threads
        self._device = device
        self._specs = SpecCache()
        self._jobs = itertools.count(-1, -1)
        """Numbers of jobs that no engine has: its own count from 1."""
        self._session: str | None = None
        self._permitted = False
        """True while the engine knows of a call that may load."""
        self._refused: Failure | None = None
        self._events: list[LoadEvent] = []
        self._ended = False
        """True once a call has marked the end, until the engine asks."""
        self._came: set[str] = set()
        """Tensors of the update that earlier calls have brought, fused ones taken apart."""
        self._stalled = StalledCall()
        self._seconds = math.inf

    def permit(self, session: str, refused: dict[str, Any] | None, seconds: float = math.inf) -> Accepted:
        """Take tensors for this update until `take`, or refuse them for a reason (`UpdateError.as_dict`).

        `seconds`: a call that has begun the update, and does nothing for so long, ends this process if it `may_end`.
        """
        if session != self._session:
            self._came.clear()
        self._session, self._permitted, self._seconds = session, True, seconds
        if self._came:
            self._expect_more()
        self._refused = Failure.of(UpdateError.from_dict(refused)) if refused is not None else None
        return Accepted()

    def take(self) -> Loaded:
        """Return what was called since the last permit, which ends with this."""
        self._stalled.returned()
        events, self._events, self._ended, self._permitted = self._events, [], False, False
        return Loaded(events=events)

    def begin(self, call: str) -> None:
        """Begin an update: what came before belongs to none."""
        with self._around(call):
            self._begin(LoadEvent(kind=LoadKind.BEGIN, call=call))

    def end(self, call: str) -> None:
        """Mark the end of an update. The engine exchanges weights when the call has returned on all ranks."""
        with self._around(call):
            self._events.append(LoadEvent(kind=LoadKind.END, call=call))
            self._ended = True

    def load(self, weights: Iterable[Named]) -> set[str]:
        """Stage checkpoint tensors: any of them, in any order, of any dtype that the manifest takes, on any device.

        Nothing of them is looked at after the call. Returns the parameters that they belong to. What is wrong with them the
        engine raises when the call has returned.
        """
        with self._around("load_weights"):
            lent = not isinstance(weights, list | tuple)
            call, targets = _Call(), set[str]()
            self._expect_more()
            try:
                for batch in _batches(weights, self._device if lent else None):
                    with torch.device("cpu"):  # callers make the GPU the default
                        targets |= self._load(batch, call)
                    self._expect_more()
            finally:
                self._events.append(call.event())
                self._came |= call.parts
            return targets

    def _expect_more(self) -> None:
        if self.may_end and self._seconds < math.inf:
            self._stalled.expect(self._seconds)

    @contextmanager
    def _around(self, call: str) -> Iterator[None]:
        with self.around():
            if not self._permitted:  # by a thread that outlives its call, say
                raise ForeignLoadError(call)
            yield

    def _begin(self, event: LoadEvent) -> None:
        self._events.append(event)
        self._came.clear()
        self._intake.begin_again()

    def _load(self, batch: list[Named], call: _Call) -> set[str]:
        """Stage some tensors of a call; returns the parameters that they belong to."""
        if self._ended:
            message = "load_weights: tensors came after the end of their update was marked, in the same call"
            call.failure = call.failure or Failure.of(UpdateError("wrong-state", message))
        call.failure = call.failure or self._refused
        if call.failure is not None:
            return set()
        manifest = self._shadow.manifest
        tensors, problems = _described(batch, manifest)
        specs = [spec for spec, _ in tensors]
        call.tensors += [(spec.name, spec.shape, spec.dtype) for spec in specs]
        call.bytes += sum(tensor.nbytes for _, tensor in tensors)
        for spec, tensor in tensors:
            if is_kv_scale(spec.name) and spec.name not in manifest.tensors and len(spec.shape) <= 1:
                call.kv_scales[spec.name] = tensor.detach().double().reshape(-1).tolist()
        brought = [name for name in manifest.parts(spec.name for spec in specs) if not manifest.ignores(name)]
        again = self._came.intersection(brought)
        if again and not call.parts:
            self._begin(LoadEvent(kind=LoadKind.AGAIN, call=min(again)))
        elif again or len(call.parts.union(brought)) < len(call.parts) + len(brought):
            twice = again | call.parts.intersection(brought) | {n for n in brought if brought.count(n) > 1}
            problems += [{"kind": "duplicate-tensor", "tensor": name} for name in sorted(twice)]
        problems += manifest.problems(specs)
        call.parts.update(brought)
        if problems:
            call.problems += problems
            return set()
        self._stage(tensors, call)
        return {piece.target for name in brought for piece in manifest.pieces.get(name, ())}

    def _stage(self, tensors: Sequence[tuple[TensorSpec, Tensor]], call: _Call) -> None:
        manifest, session = self._shadow.manifest, self._session
        assert session is not None
        names = manifest.tensors.keys() | manifest.fused.keys() | manifest.tied.keys()
        names |= manifest.scales_among(spec for spec, _ in tensors).keys()
        used = [(spec, tensor) for spec, tensor in tensors if spec.name in names]
        if not used:
            return
        held = [tensor.detach().to(self._device).contiguous() for _, tensor in used]
        sizes = [tensor.nbytes for tensor in held]
        starts = itertools.accumulate(sizes, initial=0)
        listed = [
            [spec.name, spec.shape, spec.dtype, start, size]
            for (spec, _), start, size in zip(used, starts, sizes, strict=False)
        ]
        stored = self._specs.stored(taken_apart(listed, manifest.fused))
        memory = TensorMemory(self._device, held)
        shared = {*manifest.tied, *manifest.tied.values()}
        tied = sorted((self._came | call.parts - {spec.name for spec, _ in used}) & shared)
        if self._device.type == "cuda":  # the staging thread has a stream of its own
            torch.cuda.current_stream(self._device).synchronize()
        self._intake.want(session)
        job = next(self._jobs)
        self._threads.start(
            "staging", job, lambda: self._intake.stage_held(job, session, memory, stored, tied)
        )
        result = self._threads.take_result(job, None)
        self._intake.progress.pop(job, None)
        memory.release()  # the staging thread keeps its last job
        if isinstance(result, Failure):
            call.failure = result
        elif isinstance(result, StagedTensors):
            call.problems += result.problems
            call.errors |= result.errors


def _described(
    batch: Iterable[Named], manifest: Manifest
) -> tuple[list[tuple[TensorSpec, Tensor]], list[dict[str, Any]]]:
    """Return tensors by the manifest's names, and what is wrong with others."""
    tensors, problems = [], []
    for name, tensor in batch:
        try:
            dtype = dtype_name(name, tensor)
        except ValueError as error:
            problems.append({"kind": "wrong-dtype", "tensor": name, "detail": str(error)})
            continue
        known = manifest.canonical(manifest.unwrapped(name))
        tensors.append((TensorSpec(known, tuple(tensor.shape), dtype), tensor))
    return tensors, problems


def _batches(weights: Iterable[Named], copy_to: torch.device | None) -> Iterator[list[Named]]:
    """Yield tensors some at a time, codes beside their scales.

    `copy_to`: each is copied there before the next is taken. A generator may yield all of its tensors in one memory.
    """
    batch: list[Named] = []
    waiting: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if copy_to is not None and isinstance(tensor, Tensor) and not tensor.is_meta:
            tensor = tensor.detach().to(copy_to, copy=True)
        other = _beside(name, tensor)
        if other is not None and other not in waiting:
            waiting[name] = tensor
            continue
        batch += [(name, tensor), *([(other, waiting.pop(other))] if other is not None else [])]
        size += getattr(tensor, "nbytes", 0)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    batch += waiting.items()
    if batch:
        yield batch


def _beside(name: str, tensor: Any) -> str | None:
    """Return the name of codes beside scales, or of scales beside codes."""
    if name.endswith(SCALES):
        return name.removesuffix(SCALES)
    is_codes = isinstance(tensor, Tensor) and str(tensor.dtype) == f"torch.{CODES_DTYPE}"
    return scale_name(name) if is_codes else None
