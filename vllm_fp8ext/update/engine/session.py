# SPDX-License-Identifier: Apache-2.0
"""One update from open to its end, as a pure state machine: no torch, no vLLM, no I/O, no clock of its own.

    open ──prepare──▶ prepared ──exchange──▶ committing ──confirmed──▶ committed
     ▲  ╲               │   ╲                    │
     └─chunk────────────┴────╲─doubtful──────────┘
                              ╲──▶ abandoned (given up) or expired (nothing came for its lifetime)

A chunk that arrives after `prepare` reopens the update, and so does an exchange after which a rank does not serve what was
prepared: everything must be sent again then. Ends are final and are kept for reading.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.canary import CanarySpec
from vllm_fp8ext.update.contract.chunk import Chunk, quantization_error, with_sent_names
from vllm_fp8ext.update.contract.claims import Claim, claim_problems
from vllm_fp8ext.update.contract.fused import ExpertLayout
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.results import UpdateState
from vllm_fp8ext.update.contract.spans import Spans
from vllm_fp8ext.update.contract.tensor_slices import (
    boxes_of,
    by_tensor,
    covers,
    overlapping,
    parsed_slice,
    tensor_of,
)
from vllm_fp8ext.update.contract.update_errors import PROBLEMS_LISTED, incomplete, refusal
from vllm_fp8ext.update.engine.timestamp import Moment

if TYPE_CHECKING:
    from vllm_fp8ext.update.contract.kv_request import KvRequest  # needs torch

MISSING_LISTED = 100
"""Names of missing tensors that an update tells of itself: of thousands of experts all would be a megabyte."""


class State(StrEnum):
    """State of an update."""

    OPEN = "open"
    PREPARED = "prepared"
    COMMITTING = "committing"
    """It is served, and the ranks are compared with what was prepared."""
    COMMITTED = "committed"
    ABANDONED = "abandoned"
    EXPIRED = "expired"

    @property
    def ended(self) -> bool:
        return self in (State.COMMITTED, State.ABANDONED, State.EXPIRED)


class Running(StrEnum):
    """Treatment of running requests at the commit."""

    KEEP = "keep"
    """Their cached K and V stay; the rest is sampled by the new weights."""
    RECOMPUTE = "recompute"
    """They are preempted and their K and V computed again by the new weights."""
    WAIT = "wait"
    """They finish under the old weights first; new requests wait for the commit, which has a deadline."""
    ABORT = "abort"
    """They end with finish reason `abort`, with the tokens that they have."""


@dataclass
class Session:
    """State of one update. Methods raise `UpdateError` for a call that the state does not allow."""

    id: str
    version: str
    running: Running
    manifest: Manifest
    opened_at: Moment
    lifetime: float
    """Seconds after the last activity at which an update that nobody finishes expires."""
    canary: CanarySpec
    kv_request: "KvRequest | None" = None
    """Request for the scales of its KV cache, where there is one."""
    base_epoch: int | None = None
    wait_seconds: float | None = None
    partial: bool = False
    """Parameters of which nothing is brought keep their served weights."""
    sparse: bool = False
    """Slices change what they hold: the rest of their tensors keeps its served weights. It is partial then."""
    named: bool = True
    """True if the client chose the version."""
    inplace: bool = False
    """Staged tensors overwrite served ones: a tensor that came can't be left out again."""
    claims: Mapping[str, Claim] = field(default_factory=dict)
    expert_layout: ExpertLayout | None = None
    """How the client says that fused experts lie."""
    state: State = State.OPEN
    chunks: dict[str, Chunk] = field(default_factory=dict)
    revision: int = 0
    """Counts the chunks that arrived: what was prepared holds for one revision only."""
    result: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    canary_perplexity: float | None = None
    kv: Any = None
    """The scales of its KV cache (`update.engine.kv_scales.ScaleSet`), once prepared."""
    kv_scales: dict[str, Any] | None = None
    """Summary of these scales: their source, and how well they fit."""
    fingerprints: list[int] = field(default_factory=list)
    """Fingerprints of each rank's shadow, once prepared."""
    overwritten: Set[str] = frozenset()
    """In place: tensors that chunks brought, whatever became of them."""
    through_pause: bool = False
    """True for one that is committed though somebody has paused the engine, which stays paused."""
    becomes_current: bool = True
    """False if an engine that generates nothing waits for word after the commit."""
    brought: set[str] = field(default_factory=set)
    """Tensors and slices that chunks of a sparse update have brought. What has been written can't be left out again."""
    healing: bool = False
    """Its commit failed half-way: nothing else can be served before it is sent again, whatever it was made for."""
    worked: Spans = field(default_factory=Spans)
    """When something went on for it, by `time.perf_counter()`, which is a `Moment`'s monotonic clock."""
    staged_in: Spans = field(default_factory=Spans)
    """When chunks were being staged."""
    expires_at: Moment = field(init=False)

    def __post_init__(self) -> None:
        self.touch(self.opened_at)

    @property
    def cached(self) -> str:
        """Return what becomes of cached K and V of running requests if scales change."""
        return self.kv_request.cached if self.kv_request else "rescale"

    def touch(self, now: Moment) -> None:
        """Something happened to this update: its lifetime begins again."""
        self.expires_at = now.later(self.lifetime)

    def expire(self, now: Moment) -> bool:
        """End an update whose time is over; one whose chunks are being staged is not idle. True when it ended now."""
        over = self.alterable and now.monotonic >= self.expires_at.monotonic and not self.busy
        if over:
            self.state = State.EXPIRED
        return over

    def receive(
        self,
        key: str,
        specs: Iterable[TensorSpec],
        size: int,
        sha256: str | None = None,
        sent: Mapping[str, str] | None = None,
    ) -> None:
        """A chunk arrived and is about to be staged. Sending a key again replaces what it brought. `sha256`: of its bytes, in
        hexadecimal, where that was checked. `sent`: by the name of a tensor, the one under which it came, where that is
        another.

        Raises:
            UpdateError: wrong state, or (as one report) every tensor that does not fit.
        """
        self.require_alterable("send a chunk to")
        specs = list(specs)
        existing = self.chunks.get(key)
        if existing is not None and existing.busy:
            raise UpdateError(
                "chunk-busy", f"chunk {key} is still being staged: send it again when it is done"
            )
        problems = self.manifest.problems(specs, self.expert_layout)
        known = {(problem["kind"], problem["tensor"]) for problem in problems}
        claimed = claim_problems(self.claims, specs, self.manifest)
        problems += [p for p in claimed if (p["kind"], p["tensor"]) not in known]
        brought = self.manifest.parts(spec.name for spec in specs)
        names = frozenset(brought)
        sliced = any(parsed_slice(name) for name in names)
        if len(names) < len(brought):
            problems += [
                {"kind": "duplicate-tensor", "tensor": name, "chunk": key}
                for name, count in sorted(Counter(brought).items())
                if count > 1
            ]
        if sliced:
            problems += _shared_slices(names, names, key)
        for other_key, other in self.chunks.items():
            if other_key != key:
                if sliced or other.boxes:
                    problems += _shared_slices(names, other.names, other_key)
                repeated = names & other.names
                problems += [
                    {"kind": "duplicate-tensor", "tensor": name, "chunk": other_key}
                    for name in sorted(repeated)
                    if not self.manifest.ignores(name)
                ]
        if problems:
            raise refusal(with_sent_names(problems, sent or {}))
        self.state = State.OPEN
        self.revision += 1
        self.chunks[key] = Chunk(
            names, size, sha256, sent=sent or {}, boxes=boxes_of(names) if sliced else {}
        )
        if self.sparse:
            self.brought |= {name for name in names if tensor_of(name) in self.manifest.pieces}
        if self.inplace:
            served: set[str] = {*self.manifest.tensors, *self.manifest.tied}
            self.overwritten |= served & {tensor_of(name) for name in names}

    def tied_in_others(self, key: str) -> list[str]:
        """Return names with a shared place that came in other chunks, which were not refused. An output layer and the
        embedding that serves as it share one."""
        shared = {*self.manifest.tied, *self.manifest.tied.values()}
        if not shared:
            return []
        others = (chunk.names for other, chunk in self.chunks.items() if other != key)
        return sorted(name for names in others for name in names & shared)

    def staged(
        self,
        key: str,
        problems: list[dict[str, Any]],
        errors: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Every rank has staged a chunk. One with problems counts as not sent: its tensors are missing again."""
        self.chunks[key].done(problems, errors)

    def withdraw(self, keys: Iterable[str], problem: dict[str, Any]) -> None:
        """Chunks that were staged count as not sent: their tensors are missing again."""
        self.require_alterable("take a chunk from")
        chunks = [self.chunks[key] for key in keys if key in self.chunks and self.chunks[key].staged]
        for chunk in chunks:
            chunk.done([problem])
        if chunks:
            self.state = State.OPEN
            self.revision += 1

    def took_staging(self, start: float, stop: float) -> None:
        """A chunk came at `start` and was staged at `stop`. Time in which it waited for others counts once."""
        self.staged_in.add(start, stop)
        self.took("staging", start, stop)
        self.seconds["staging"] = self.staged_in.seconds

    def took(self, phase: str, start: float, stop: float) -> None:
        """Record a phase: what no phase takes is `waiting`."""
        self.worked.add(start, stop)
        self.seconds[phase] = stop - start

    def ended_at(self, stop: float) -> None:
        """Record `total`, and what no phase has taken of it, `waiting`."""
        total = stop - self.opened_at.monotonic
        self.seconds |= {"waiting": total - self.worked.seconds, "total": total}

    def staged_names(self) -> Set[str]:
        """Tensors that staged chunks have brought."""
        staged = [chunk.names for chunk in self.chunks.values() if chunk.staged]
        names = staged[0] if len(staged) == 1 else frozenset[str]().union(*staged)
        sliced = by_tensor(chunk.boxes for chunk in self.chunks.values() if chunk.staged and chunk.boxes)
        if sliced:
            names |= self.manifest.covered(sliced)
        known: Set[str] = self.manifest.tensors.keys()
        if self.manifest.tied:
            known = known | self.manifest.tied.keys()
        return names if names == known else known & names

    def required(self) -> Set[str]:
        """Tensors that the update must bring: all; of a partial one those that were announced, refused, or overwritten in
        place, and the whole of every parameter of which something came."""
        if not self.partial:
            return self.manifest.tensors.keys()
        refused = {tensor_of(name) for chunk in self.chunks.values() for name in chunk.refused}
        refused |= by_tensor(chunk.boxes for chunk in self.chunks.values()).keys()
        claimed = set(map(tensor_of, self.manifest.parts(self.claims)))
        if self.sparse:
            tied = {self.manifest.tied.get(name, name) for name in self.overwritten}
            return (set(map(tensor_of, self.brought)) | claimed | tied) & self.manifest.tensors.keys()
        overwritten = {self.manifest.tied.get(name, name) for name in self.overwritten}
        return self.manifest.completed(self.staged_names() | refused | set(claimed) | overwritten)

    def missing(self) -> Set[str]:
        """Required tensors that no staged chunk has brought; and output layers that are served as the embedding, which need
        not come, where they were announced or refused."""
        required, staged = self.required(), self.staged_names()
        if self.sparse:
            staged = staged | (required - set(map(tensor_of, self._unstaged())) - self._claimed_whole())
        missing = frozenset() if required == staged else required - staged
        tied = self.manifest.tied.keys()
        if not tied:
            return missing
        refused = {name for chunk in self.chunks.values() for name in chunk.refused}
        return missing | ((refused | self.claims.keys()) & tied) - staged

    def _require_whole_blocks(self) -> None:
        staged = (chunk.names for chunk in self.chunks.values() if chunk.staged)  # they share no elements
        lacking = self.manifest.lacking_in_blocks(name for names in staged for name in names)
        if lacking:
            raise incomplete(lacking, len(self.required()), [], "a sparse update of whole blocks")

    def _claimed_whole(self) -> set[str]:
        """Return tensors that were announced as a whole."""
        return set(self.manifest.parts(name for name in self.claims if parsed_slice(name) is None))

    def _unstaged(self) -> list[str]:
        """Return what a sparse update must still bring: slices that were announced, and what was refused, or replaced."""
        staged = [chunk for chunk in self.chunks.values() if chunk.staged]
        names = frozenset[str]().union(*(chunk.names for chunk in staged))
        boxes = by_tensor(chunk.boxes for chunk in staged)
        announced = {
            name for name in self.claims if parsed_slice(name) and tensor_of(name) in self.manifest.pieces
        }
        slices = [(name, parsed_slice(name)) for name in (self.brought | announced) - names]
        return sorted(
            name
            for name, part in slices
            if part is None or (part.tensor not in names and not covers(boxes.get(part.tensor, ()), part.box))
        )

    def written(self) -> Set[str]:
        """Return the tensors that were staged, or some slices of them."""
        return self.staged_names() | set(map(tensor_of, self.brought))

    def _lacking(self, name: str) -> list[str]:
        """Return what a missing tensor lacks: slices of it, where others have come."""
        came = by_tensor(chunk.boxes for chunk in self.chunks.values() if chunk.staged and chunk.boxes)
        return self.manifest.lacking(name, came[name]) if name in came else [name]

    def check(self, epoch: int) -> None:
        """Require that everything is here and that the update fits the served `epoch`.

        Raises:
            UpdateError: `stale-base`, `staging`, or `incomplete` with every missing tensor and every refused chunk.
        """
        self.require_alterable("prepare")
        self.check_base(epoch)
        if self.busy:
            raise UpdateError("staging", "chunks are still being staged: prepare when they are done")
        missing = self.missing()
        if self.sparse and not missing:
            self._require_whole_blocks()
        if missing or not self.written():
            required = len(self.required())
            lacking = self._unstaged() or sorted(name for tensor in missing for name in self._lacking(tensor))
            raise incomplete(lacking, required, self.problems, count=self.problem_count)

    def prepared(self, revision: int) -> None:
        """Mark what was staged up to `revision` as validated as a whole.

        Raises:
            UpdateError: `staging`, when chunks arrived since.
        """
        self.require_unchanged(revision)
        self.state = State.PREPARED

    def require_unchanged(self, revision: int) -> None:
        """Require that what is being prepared, of `revision`, is still wanted.

        Raises:
            UpdateError: `staging`, when chunks arrived since.
        """
        self.require_alterable("prepare")
        if revision != self.revision:
            raise UpdateError("staging", "a chunk arrived while the update was prepared: prepare it again")

    def check_base(self, epoch: int) -> None:
        """Refuse an update that was made for other weights than those that are served."""
        if self.base_epoch not in (None, epoch) and not self.healing:
            raise UpdateError(
                "stale-base",
                f"the update was made for epoch {self.base_epoch}; epoch {epoch} is served",
                expected=self.base_epoch,
                found=epoch,
            )

    def require_prepared(self) -> None:
        """Raises `UpdateError` unless the update can be committed."""
        self.require_alterable("commit")
        if self.state is not State.PREPARED:
            raise UpdateError("not-prepared", f"can't commit: the update is {self.state}, prepare it first")

    def exchanged(self) -> None:
        """The exchange is done on every rank."""
        self.require_prepared()
        self.state = State.COMMITTING

    def commit(self, result: dict[str, Any]) -> None:
        """Every rank was seen to serve what was prepared."""
        self.state = State.COMMITTED
        self.result = result

    def forget(self) -> None:
        """Forget what was staged: everything must be sent again."""
        self.state = State.OPEN
        self.healing = True
        self.revision += 1
        self.chunks.clear()

    def restart(self, *, whole: bool) -> None:
        """Forget what came: its sender begins again. `whole`: from now on every tensor must come."""
        self.require_alterable("begin again")
        self.state = State.OPEN
        self.revision += 1
        self.chunks.clear()
        self.partial = self.partial and not whole

    def abandon(self) -> bool:
        """Give the update up. Idempotent; a committed one can't be. True when it ended now."""
        if self.state is State.COMMITTED:
            raise UpdateError("wrong-state", "can't abandon: the update is committed (roll back instead)")
        if self.state is State.COMMITTING:
            self.require_alterable("abandon")
        given_up = self.live
        if given_up:
            self.state = State.ABANDONED
        return given_up

    @property
    def live(self) -> bool:
        return not self.state.ended

    @property
    def alterable(self) -> bool:
        """True while calls can still do something to it: it is not served yet, and has not ended."""
        return self.state in (State.OPEN, State.PREPARED)

    @property
    def busy(self) -> bool:
        """True while chunks are being staged."""
        return any(chunk.busy for chunk in self.chunks.values())

    @property
    def bytes(self) -> int:
        """Bytes of the staged chunks."""
        return sum(chunk.bytes for chunk in self.chunks.values() if chunk.staged)

    @property
    def problems(self) -> list[dict[str, Any]]:
        """Return the first problems of refused chunks."""
        each = (problem for chunk in self.chunks.values() for problem in chunk.problems)
        return list(islice(each, PROBLEMS_LISTED))

    @property
    def problem_count(self) -> int:
        """How many problems the chunks had that were refused."""
        return sum(chunk.problem_count for chunk in self.chunks.values())

    def describe(self) -> UpdateState:
        """Return the state as answers show it."""
        missing = self.missing() if self.live else frozenset[str]()
        return UpdateState(
            id=self.id,
            state=str(self.state),
            version=self.version,
            running=str(self.running),
            base_epoch=self.base_epoch,
            opened_at=self.opened_at.unix,
            expires_at=self.expires_at.unix if self.live else None,
            partial=self.partial,
            sparse=self.sparse,
            world_size=self.manifest.world_size,
            tensors_required=len(self.required()),
            tensors_missing=len(missing),
            missing=nsmallest(MISSING_LISTED, missing),
            bytes=self.bytes,
            # any number of chunks may bring nothing
            chunks={
                key: chunk.as_dict() for key, chunk in self.chunks.items() if chunk.names or not chunk.staged
            },
            problems=self.problems,
            problem_count=self.problem_count,
            seconds=dict(self.seconds),
            quantization_error=self.quantization_error,
            canary_perplexity=self.canary_perplexity,
            kv_scales=self.kv_scales,
            result=self.result,
        )

    @property
    def quantization_error(self) -> dict[str, Any] | None:
        """Return the error of what was staged (`chunk.quantization_error`)."""
        return quantization_error(self.chunks.values())

    def require_alterable(self, action: str) -> None:
        if self.state is State.EXPIRED:
            message = f"can't {action} this update: nothing came for {self.lifetime:g} s, and it expired"
            raise UpdateError("expired", message, status=410)
        if not self.alterable:
            raise UpdateError("wrong-state", f"can't {action} this update: it is {self.state}")


def _shared_slices(names: Set[str], others: Set[str], chunk: str) -> list[dict[str, Any]]:
    """Describe slices that bring what another one, in `chunk`, has brought."""
    return [
        {
            "kind": "duplicate-tensor",
            "tensor": name,
            "chunk": chunk,
            "detail": f"{other} has elements of it, too",
        }
        for name, other in sorted(overlapping(names, others).items())
    ]
