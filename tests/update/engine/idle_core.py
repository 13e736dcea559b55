# SPDX-License-Identifier: Apache-2.0
"""An engine core without requests, and ranks that answer at once."""

from typing import Any, ClassVar

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import Failure
from vllm_fp8ext.update.contract.canary import CanarySpec
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.rank_results import (
    Accepted,
    CanaryScore,
    Fingerprint,
    RankDigests,
    RankProgress,
    RankResult,
    SwapTime,
)
from vllm_fp8ext.update.engine.engine import UpdateEngine
from vllm_fp8ext.update.engine.session import Running, Session

SPEC = TensorSpec("w", (2,), "bfloat16")
CANARY = CanarySpec([[1]], built_in=True)


class IdleCore:
    """A `Core` that stands still, whose ranks must not be asked."""

    settings = Settings()
    quantization = "blockfp8"
    kv_cache_dtype = "auto"
    vocabulary = longest_prompt = 100
    instance = "abc"
    pids: ClassVar[list[int]] = [7]

    def __init__(self) -> None:
        self.sleeps = False

    def asleep(self) -> bool:
        return self.sleeps

    def paused(self) -> bool:
        return False

    def unfinished(self) -> int:
        return 0

    def irreplaceable(self) -> int:
        return 0

    def draft_acceptance(self) -> None:
        return None

    def ranks(self, method: str, *_: Any) -> list[RankResult]:
        raise AssertionError(method)


def opened(engine: UpdateEngine, **more: Any) -> Session:
    manifest = Manifest({"w": SPEC}, frozenset(), {"w": ()}, "fp32", 1)
    session = Session("u", "v", Running.KEEP, manifest, engine._clock(), 1e6, CANARY, **more)
    engine.updates.sessions["u"] = session
    return session


class Ranks:
    """One rank whose jobs are done when they are asked about; `fails`: the method whose job fails. `recorded`: its canary."""

    def __init__(self, fails: str = "", *, recorded: bool = False) -> None:
        self.calls: list[str] = []
        self.busy = False
        self.fingerprint = 1
        self._fails = fails
        self._recorded = recorded
        self._last = ""

    def __call__(self, method: str, *_: Any) -> list[RankResult]:
        self.calls.append(method)
        if method == "wait_for_swap":
            return [SwapTime(seconds=0.0)]
        if method != "poll":
            self._last = method
            return [Accepted()]
        if self.busy:
            return [RankProgress()]
        if self._last == self._fails:
            return [Failure(kind="internal", message="no", status=500)]
        if self._last == "run_canary":
            return [CanaryScore()]
        if self._last == "digests":
            return [RankDigests(rank=0, digests={}, addresses="")]
        canary = CanaryScore() if self._recorded and self._last == "fingerprint_shadow" else None
        return [Fingerprint(fingerprint=self.fingerprint, canary=canary)]
