# SPDX-License-Identifier: Apache-2.0
"""Tensors that one `update_weights` of vLLM's weight transfer brings: received, or read where they are, and staged."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract import native_info
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.native_handles import exported
from vllm_fp8ext.update.contract.native_info import IpcInit, NcclInit, spec_bytes
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import Accepted, failures
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.contract.update_errors import refusal
from vllm_fp8ext.update.engine.chunk_staging import ChunkStaging
from vllm_fp8ext.update.engine.committer import Core
from vllm_fp8ext.update.engine.jobs import Flow, OnRanks
from vllm_fp8ext.update.engine.session import Session
from vllm_fp8ext.update.engine.timestamp import Moment
from vllm_fp8ext.update.transports.native.message import NativeSource, batches, native_source, placed
from vllm_fp8ext.update.transports.native_ipc.message import NativeIpcSource, stored
from vllm_fp8ext.update.transports.transport import Source

_GROUP_LOST = ("transfer-failed", "transfer-timeout")
"""Kinds of errors after which a group takes no more part in broadcasts."""


@dataclass(frozen=True, kw_only=True)
class TrainerGroup:
    """A trainer's group, as the ranks know it by its `number`."""

    number: int
    init: NcclInit


@dataclass(frozen=True, kw_only=True)
class Received:
    """Outcome of a call: everything that is wrong, and whether its group is `lost`."""

    errors: list[UpdateError]
    lost: bool = False


class NativeTensors:
    """Has the ranks receive tensors, a chunk at a time."""

    def __init__(self, core: Core, chunks: ChunkStaging, clock: Callable[[], Moment]) -> None:
        self._core = core
        self._staging = chunks
        self._clock = clock
        self._settings = core.settings
        self._chunks = 0

    def source(self, group: TrainerGroup, parts: Sequence[int] = ()) -> NativeSource:
        """Return broadcasts of so many bytes each; without any, all that ranks do is join the group."""
        backend = "gloo" if self._core.device_type == "cpu" else "nccl"
        seconds = self._settings.upload_idle_seconds
        return native_source(group.init, group.number, backend, seconds, parts)

    def receive(self, session: Session, group: TrainerGroup, info: Any) -> Flow[Received]:
        """Receive all that was announced, and stage it unless something is wrong.

        It stops where the update has ended meanwhile: its trainer has gone, and a group of another may be there. It also
        stops where a rank has left the group, or is behind the others: it would take one broadcast for another.
        """
        told = native_info.announced(native_info.own_part(info, session.manifest.world_size))
        init = _overridden(group.init, told, self._settings.receive_bytes)
        specs = _unwrapped(session, told.specs)
        sizes = [spec_bytes(spec) for spec in specs]
        refused = _refused(session, specs)
        errors = [] if refused is None else [refused]
        for parts, tensors in batches(specs, sizes, init.bucket_bytes, self._settings.receive_bytes):
            if not session.alterable:
                message = f"the update has ended meanwhile: it is {session.state}"
                errors.append(UpdateError("wrong-state", message))
                break
            session.touch(self._clock())
            batch = placed(self.source(group, parts), tensors)
            try:
                yield from in_step(self._taken(session, batch.source, batch.tensors, sum(parts), errors))
            except OutOfStepError as error:
                return Received(errors=[*errors, error.reason], lost=True)
            except UpdateError as error:
                errors.append(error)
                if error.kind in _GROUP_LOST:
                    return Received(errors=errors, lost=True)
        return Received(errors=errors)

    def read(self, session: Session, init: IpcInit, info: Any) -> Flow[Received]:
        """Read tensors where a trainer on this machine holds them.

        Raises:
            UpdateError: what is wrong with them.
        """
        told = native_info.announced(info)
        native_info.require_wire(told.wire, ("ipc_handles", "tensor_sizes"))
        handles, sizes = told.wire.get("ipc_handles"), told.wire.get("tensor_sizes")
        gpus = exported(handles, told.specs, packed=init.packed, sizes=sizes)
        specs = _unwrapped(session, told.specs)
        refused = _refused(session, specs)
        if refused is not None:
            raise refused
        if not specs:
            return Received(errors=[])
        session.touch(self._clock())
        source = NativeIpcSource(gpus=gpus, packed=init.packed)
        bytes_each = [spec_bytes(spec) for spec in specs]
        tensors = stored(specs, bytes_each)
        yield from self._staged(session, source, tensors, sum(bytes_each))
        return Received(errors=[])

    def _taken(
        self,
        session: Session,
        source: NativeSource,
        tensors: Sequence[StoredTensor],
        size: int,
        errors: list[UpdateError],
    ) -> Flow[None]:
        """Stage a batch of broadcasts, or receive them alone where something is wrong."""
        if not errors:
            try:
                staging = self._staged(session, source, tensors, size)
            except UpdateError as error:
                errors.append(error)
            else:
                yield from staging
                return
        yield from on_ranks(session.id, source)

    def _staged(
        self, session: Session, source: Source, tensors: Sequence[StoredTensor], size: int
    ) -> Flow[object]:
        """Enter a chunk in its session, and return the flow that stages it.

        Raises:
            UpdateError: as `ChunkStaging.prepare`.
        """
        listed = [[t.spec.name, list(t.spec.shape), t.spec.dtype, t.start, t.size] for t in tensors]
        self._chunks += 1
        chunk = f"native-{self._chunks}"
        call, _ = self._staging.prepare(session, chunk, source.as_dict(), listed, size)
        return self._staging.run(session, chunk, call)


class OutOfStepError(Exception):
    """A rank could not begin what others have begun."""

    def __init__(self, reason: UpdateError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def in_step(flow: Flow[None]) -> Flow[None]:
    """Go through a flow of one step.

    Raises:
        OutOfStepError: some ranks have begun the step, and others could not.
        UpdateError: the flow's.
    """
    results = yield next(flow)
    begun = any(isinstance(result, Accepted) for result in results)
    try:
        flow.send(results)
    except StopIteration:
        return
    except UpdateError as error:
        if begun and failures(results):
            raise OutOfStepError(error) from error
        raise


def on_ranks(id: str, source: NativeSource) -> Flow[None]:
    """Have the ranks take part in broadcasts of which nothing is staged.

    Raises:
        UpdateError: of the first rank that could not.
    """
    results = yield OnRanks(RankMethod.STAGE, id, source.as_dict(), [], {}, 0.0, [])
    failed = failures(results)
    if failed:
        raise failed[0].error


def merged(errors: Sequence[UpdateError]) -> UpdateError:
    """Return one error for all: everything that is wrong with tensors, or the first."""
    problems = [problem for error in errors for problem in error.details.get("problems", ())]
    if len(errors) > 1 and all("problems" in error.details for error in errors):
        return refusal(problems)
    return errors[0]


def _unwrapped(session: Session, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [replace(spec, name=session.manifest.unwrapped(spec.name)) for spec in specs]


def _overridden(init: NcclInit, told: native_info.Announced, most_bytes: int) -> NcclInit:
    """Return how these tensors come: trainers of vLLM before 0.28 say it with each call."""
    wire = dict(told.wire)
    names = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")
    native_info.require_wire(wire, names)
    if not wire:
        return init
    packed = wire.get("packed", init.packed)
    size = wire.get("packed_buffer_size_bytes", init.packed_buffer_size_bytes)
    if type(packed) is not bool or type(size) is not int or size < 1 or (packed and size > most_bytes):
        raise native_info.invalid(
            f"update_info: expected packed as a boolean, and buckets up to {most_bytes} bytes, found {wire!r:.200}"
        )
    return replace(init, packed=packed, packed_buffer_size_bytes=size)


def _refused(session: Session, specs: Sequence[TensorSpec]) -> UpdateError | None:
    """Return the error of tensors of one call that can be told before they come."""
    manifest = session.manifest
    canonical = [replace(spec, name=manifest.canonical(spec.name)) for spec in specs]
    problems = manifest.problems(canonical, session.expert_layout)
    brought = Counter(manifest.parts(spec.name for spec in canonical))
    earlier = {name for chunk in session.chunks.values() for name in chunk.names}
    problems += [
        {"kind": "duplicate-tensor", "tensor": name}
        for name, count in sorted(brought.items())
        if (count > 1 or name in earlier) and not manifest.ignores(name)
    ]
    return refusal(problems) if problems else None
