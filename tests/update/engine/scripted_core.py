# SPDX-License-Identifier: Apache-2.0
"""An engine core whose steps and ranks do what a test has written down."""

from collections.abc import Callable
from typing import Any, ClassVar

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.update.contract.labels import Label
from vllm_fp8ext.update.contract.rank_results import Accepted, RankResult, SwapTime
from vllm_fp8ext.update.engine.committer import Committer
from vllm_fp8ext.update.engine.kv_scales import KvEngine
from vllm_fp8ext.update.engine.totals import Totals

BEFORE = Label(0, "epoch-0", "abc")
NEW = BEFORE.next("step-1")
SWAP_SECONDS = 2.0**-30


class ScriptedCore:
    """A `Core` whose ranks swap one bit. `failures`: for each call of `exchange`, the ranks that fail and whether each is
    `broken` then; a broken rank's contents are None. `unsettled`: ranks whose exchange does not end."""

    settings = Settings()
    quantization = "blockfp8"
    kv_cache_dtype = "auto"
    vocabulary = 100
    longest_prompt = 100
    compiled: ClassVar[list[dict[str, int]]] = []
    instance = "abc"
    pids: ClassVar[list[int]] = [7]

    def __init__(self, ranks: int = 2) -> None:
        self.swapped: list[bool | None] = [False] * ranks
        self.failures: list[dict[int, bool]] = []
        self.unsettled: set[int] = set()
        self.swap_seconds = SWAP_SECONDS
        self.requests = 0
        self.prompts = 0
        """Of these requests, those without a token."""
        self.kept = 0
        self.state = "on"
        self.refusing = False
        self.caches_fail = False
        self.told: list[str] = []
        self.others_paused = False
        self.reports: list[Callable[[float], None]] = []

    def ranks(self, method: str, *args: Any) -> list[RankResult]:
        if method == "wait_for_swap":
            self.told.append("settle")
            return [self._settle(rank) for rank in range(len(self.swapped))]
        assert method == "swap"
        assert self.state == "paused", "no step may begin meanwhile"
        [only] = args or [list(range(len(self.swapped)))]
        self.told.append(f"exchange {only}")
        failing = self.failures.pop(0) if self.failures else {}
        return [
            self._exchange(rank, failing) if rank in only else Accepted() for rank in range(len(self.swapped))
        ]

    def _exchange(self, rank: int, failing: dict[int, bool]) -> RankResult:
        if rank not in failing:
            self.swapped[rank] = None if self.swapped[rank] is None else not self.swapped[rank]
            return Accepted()
        if failing[rank]:
            self.swapped[rank] = None
        error = UpdateError("exchange-failed", f"rank {rank}: copy failed", status=500)
        return Failure.of(error, unchanged=not failing[rank])

    def _settle(self, rank: int) -> RankResult:
        if rank in self.unsettled:
            return Failure(kind="internal", message="no device", status=500)
        return SwapTime(seconds=self.swap_seconds * rank)

    def stop(self) -> None:
        self.state = "paused"
        self.reports.clear()
        self.told.append("stop")

    def drain(self) -> None:
        assert self.state == "paused"
        self.told.append("drain")

    def begin_step(self) -> None:
        assert self.state == "on"
        assert not self.reports, "that it is queued is not what the stall lasts to"
        self.told.append("begin step")

    def hold(self) -> None:
        self.stop()
        self.drain()

    def release(self) -> None:
        pass

    def resume(self) -> None:
        self.state = "on"
        self.told.append("resume")

    def paused(self) -> bool:
        return self.state != "on"

    def interrupted(self) -> bool:
        return self.others_paused

    def asleep(self) -> bool:
        return False

    def admit_no_more(self) -> None:
        self.state = "admits no more"
        self.told.append("admit no more")

    def unfinished(self) -> int:
        return self.requests

    def irreplaceable(self) -> int:
        return self.kept

    def abort_running(self) -> None:
        self.requests = 0
        self.told.append("abort")

    def refuse_requests(self) -> None:
        self.refusing = True
        self.told.append("refuse")

    def accept_requests(self) -> None:
        self.refusing = False
        self.told.append("accept")

    def restart_prompts(self) -> tuple[int, int]:
        self.told.append("restart")
        self.requests -= self.prompts  # they wait, and hold nothing
        return self.prompts, 100 * self.prompts

    def enter_epoch(self, label: Label, *, recompute: bool) -> None:
        if self.caches_fail:
            raise RuntimeError("no block pool")
        if recompute:
            self.requests = 0  # they wait, and hold nothing
        self.told.append(f"epoch {label.epoch} {label.version}{' recompute' if recompute else ''}")

    def relabel(self, label: Label) -> None:
        self.told.append(f"relabel {label.epoch} {label.version}")

    def recent_tokens(self) -> list[list[int]]:
        return []

    def draft_acceptance(self) -> None:
        return None

    def held_blocks(self) -> list[dict[str, Any]]:
        return []

    def time_next_step(self, report: Callable[[float], None]) -> None:
        self.reports.append(report)


def step_of(core: ScriptedCore, totals: Totals) -> Committer:
    return Committer(core, totals, KvEngine(core))
