# SPDX-License-Identifier: Apache-2.0
"""Several engine cores as one: what an update asks of a core is asked of each, at a boundary of its own steps.

The update engine of data-parallel ranks calls no core directly and runs in a thread beside them: no step waits for it, and
ranks that step together meet in their collectives as ever.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from vllm_fp8ext.update.contract.labels import Label
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import RankResult
from vllm_fp8ext.update.engine.committer import Core

FRESH_SECONDS = 0.05
"""Age of an answer up to which its facts hold, where nothing depends on them."""


@dataclass(frozen=True, kw_only=True)
class CoreFacts:
    """State of one core as it answers a call. `paused`: by others. `stalled_until`: the end of the first step after an
    exchange, by `time.perf_counter()`, told once."""

    pid: int
    paused: bool
    unfinished: int
    asleep: bool
    interrupted: bool
    compiled: list[dict[str, int]] = field(default_factory=list)
    stalled_until: float | None = None


@dataclass(frozen=True, kw_only=True)
class CoreReply:
    """Answer of a core to a call: its result, or what the call raised."""

    result: Any = None
    error: Exception | None = None
    facts: CoreFacts


class Member(Protocol):
    """One core of a group, from the thread of the update engine."""

    def send(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Call a method of the core (`compat.update.core_member.CoreMember`) at its next step boundary."""

    def receive(self) -> CoreReply:
        """Wait for the answer. A core that has ended, or does not run, ends this one."""


class CoreGroup:
    """The cores of one server (`committer.Core`); `own`: that of this process, whose settings are all the others', too."""

    def __init__(self, own: Core, members: Sequence[Member]) -> None:
        self.settings = own.settings
        self.quantization = own.quantization
        self.kv_cache_dtype = own.kv_cache_dtype
        self.vocabulary = own.vocabulary
        self.longest_prompt = own.longest_prompt
        self.instance = own.instance
        self.weight_transfer = own.weight_transfer
        self.device_type = own.device_type
        self._own = own
        self._members = members
        self._facts: list[CoreFacts] = []
        self._asked = 0.0
        self._report: Callable[[float], None] | None = None
        self._stalled = 0
        """Cores whose next step is timed and that have not told its end."""
        self._last_end = 0.0
        self._all("look")

    @property
    def compiled(self) -> list[dict[str, int]]:
        """Counts by rank of what its process had compiled when it was last called."""
        return [counts for facts in self._facts for counts in facts.compiled]

    @property
    def pids(self) -> list[int]:
        """Processes of the cores."""
        return [facts.pid for facts in self._facts]

    def ranks(self, method: RankMethod, *args: Any) -> list[RankResult]:
        """Run a method on every rank of every core; the ranks of core 0 come first."""
        calls = [(method, *args)] * len(self._members)
        if method is RankMethod.KV_RESCALE:  # blocks are numbered by each core for itself
            calls = [(method, blocks) for blocks in args[0]]
        return [result for results in self._each("ranks", calls) for result in results]

    def held_blocks(self) -> list[Any]:
        """List blocks of K and V that running requests hold, by core."""
        return self._all("held_blocks")

    def recent_tokens(self) -> list[list[int]]:
        """Tokens of the requests that ended last, the last of each core first."""
        return _in_turn(self._all("recent_tokens"))

    def draft_acceptance(self) -> None:
        """Return None: several cores serve no drafts."""

    def end(self, reason: str) -> NoReturn:
        """End the server at once: one of its cores does not do what it must."""
        self._own.end(reason)

    def stop(self) -> None:
        """Begin no step in any core until `resume`. What others ask of a core meanwhile comes after."""
        self._all("stop")

    def drain(self) -> None:
        """Finish the steps in flight."""
        self._all("drain")

    def hold(self) -> None:
        """Finish what is in flight and begin nothing until `resume`."""
        self.stop()
        self.drain()

    def release(self) -> None:
        """Do nothing: a core that is to serve nothing must not step before it is stopped again."""

    def begin_step(self) -> None:
        """Do nothing: each core begins its next step by itself, ranks that step together at the same time."""

    def resume(self) -> float:
        """Schedule again where others have not paused a core; seconds between the first core that does and the last."""
        times = self._all("resume")
        return float(max(times) - min(times))

    def pause_state(self) -> None:
        """Return nothing: each core remembers what others had asked of it (`resume`)."""

    def pause_again(self, state: Any) -> None:
        """Do nothing: `resume` has left each core as others had paused it."""

    def unpause(self) -> None:
        """Schedule again, whoever has paused the engine."""
        self._all("unpause")

    def admit_no_more(self) -> None:
        """Let the requests that run go on; new ones wait until `resume`."""
        self._all("admit_no_more")

    def paused(self) -> bool:
        """Tell whether somebody else has paused a core."""
        return any(facts.paused for facts in self._fresh())

    def interrupted(self) -> bool:
        """Tell whether others have paused a core since `admit_no_more`."""
        return any(facts.interrupted for facts in self._fresh())

    def asleep(self) -> bool:
        """Tell whether weights have given their memory back."""
        return any(facts.asleep for facts in self._fresh())

    def unfinished(self) -> int:
        """Requests that have begun and hold K and V."""
        return sum(facts.unfinished for facts in self._fresh())

    def irreplaceable(self) -> int:
        """Requests whose K and V can't be computed again."""
        return sum(self._all("irreplaceable"))

    def abort_running(self) -> None:
        """End every request that has begun."""
        self._all("abort_running")

    def refuse_requests(self) -> None:
        """End every request with an error, and each one that comes, until `accept_requests`."""
        self._all("refuse_requests")

    def accept_requests(self) -> None:
        """Undo `refuse_requests`."""
        self._all("accept_requests")

    def restart_prompts(self) -> tuple[int, int]:
        """Have requests without a token begin again; counts them and their tokens."""
        counts = self._all("restart_prompts")
        return sum(prompts for prompts, _ in counts), sum(tokens for _, tokens in counts)

    def enter_epoch(self, label: Label, *, recompute: bool) -> None:
        """Mark every token sampled from now on. Hide cached K and V of earlier epochs."""
        self._all("enter_epoch", label, recompute)

    def relabel(self, label: Label) -> None:
        """Mark every token sampled from now on by another version of the same weights."""
        self._all("relabel", label)

    def time_next_step(self, report: Callable[[float], None]) -> None:
        """Call `report` with the end of the last core's next step, by `time.perf_counter()`."""
        self._report, self._stalled, self._last_end = report, 0, 0.0
        self._stalled = sum(self._all("time_step"))

    def _fresh(self) -> list[CoreFacts]:
        if time.monotonic() - self._asked > FRESH_SECONDS:
            self._all("look")
        return self._facts

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        return self._each(name, [arguments] * len(self._members))

    def _each(self, name: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call every core, each with its arguments; they do it at the same time.

        Raises:
            Exception: what the first core raised, when all have answered.
        """
        for member, arguments in zip(self._members, calls, strict=True):
            member.send(name, arguments)
        replies = [member.receive() for member in self._members]
        self._facts, self._asked = [reply.facts for reply in replies], time.monotonic()
        self._take_stalls([reply.facts.stalled_until for reply in replies])
        for reply in replies:
            if reply.error is not None:
                raise reply.error
        return [reply.result for reply in replies]

    def _take_stalls(self, ends: Sequence[float | None]) -> None:
        known = [end for end in ends if end is not None]
        if self._report is None or not known:
            return
        self._stalled -= len(known)
        self._last_end = max(self._last_end, *known)
        if self._stalled <= 0:
            report, self._report = self._report, None
            report(self._last_end)


def _in_turn(lists: Sequence[list[list[int]]]) -> list[list[int]]:
    """Return one of each list in turn."""
    longest = max(map(len, lists), default=0)
    return [each[place] for place in range(longest) for each in lists if place < len(each)]
