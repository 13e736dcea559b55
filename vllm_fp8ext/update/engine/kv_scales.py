# SPDX-License-Identifier: Apache-2.0
"""Which KV-cache scales an update brings, and what becomes of the cached K and V when it is served."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from vllm_fp8ext.config import Settings
from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.kv_types import Scales
from vllm_fp8ext.update.contract.kv_merge import largest, remembered
from vllm_fp8ext.update.contract.kv_request import Asked, asked_of
from vllm_fp8ext.update.contract.kv_tokens import Tokens, choose
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import raise_first
from vllm_fp8ext.update.engine.jobs import Jobs, Result
from vllm_fp8ext.update.engine.kv_report import layer_reports, traffic_reports, worst
from vllm_fp8ext.update.worker.kv_scales import computed

logger = logging.getLogger("vllm.fp8ext")


class Core(Protocol):
    """What it needs of an engine core."""

    settings: Settings
    kv_cache_dtype: str
    vocabulary: int
    longest_prompt: int

    def ranks(self, method: RankMethod, *args: Any) -> list[dict[str, Any]]: ...
    def recent_tokens(self) -> list[list[int]]: ...
    def held_blocks(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class ScaleSet:
    """`epoch`: of the weights that they were computed for. `source`: what they were computed from. `layers`: how well they
    fitted then (`report.layer_reports`)."""

    scales: Scales
    policy: str
    epoch: int
    source: str
    tokens: int = 0
    layers: dict[str, Any] = field(default_factory=dict)

    def summary(self, epoch: int) -> Result:
        """In short, while `epoch` is served."""
        return {
            "policy": self.policy,
            "source": self.source,
            "tokens": self.tokens,
            "epoch": self.epoch,
            "age": epoch - self.epoch,
            "fit": worst(self.layers),
        }


def _first(parts: list[Result]) -> ScaleSet:
    """Those that the server was started with, of its ranks' answers."""
    scales = largest([part["scales"] for part in parts])
    calibrated = parts[0]["calibrated"]
    if not calibrated:
        return ScaleSet(scales, "static", 0, "start")
    layers = layer_reports([part["calibrated"]["fits"] for part in parts], calibrated["amax"], scales)
    return ScaleSet(scales, "calibrate", 0, calibrated["source"], calibrated["tokens"], layers)


def _cached_scales(found: ScaleSet) -> list[list[float]]:
    """Those by which K and V are cached: queries are not."""
    return [kinds[kind] for kinds in found.scales.values() for kind in ("k", "v")]


class KvEngine:
    """The scales of an engine. Without an FP8 KV cache, or without updates, there are none (`enabled`)."""

    def __init__(self, core: Core, jobs: Jobs) -> None:
        self._core = core
        self._jobs = jobs
        found = core.settings.kv_scales
        self.enabled = (
            core.kv_cache_dtype.startswith("fp8") and found is not None and core.settings.staging != "none"
        )
        self._settings = found or KvScaleSettings(policy="static")
        self._served: ScaleSet | None = None
        self._previous: ScaleSet | None = None
        self.traffic: dict[str, Any] = {}
        """Of what was recorded before the last update (`report.traffic_reports`)."""
        self._rescaled: dict[str, int] | None = None
        """What became of cached codes at the last exchange."""
        self._history: deque[Scales] = deque(maxlen=self._settings.history_length)
        """Largest values that were recorded before each commit."""
        self._recorded: Scales = {}
        """Those since the last commit: an update that is given up does not lose them."""

    @property
    def served(self) -> ScaleSet:
        """What is served."""
        if self._served is None:
            parts = self._core.ranks(RankMethod.KV_SERVED)
            raise_first(parts)
            self._served = _first(parts)
            self._warn(self._served.layers, f"with scales from {self._served.source}")
        return self._served

    def asked(self, told: Any) -> Asked | None:
        """What an update asks for. Raises `UpdateError` (`invalid-request`)."""
        if not self.enabled:
            return None
        core, records = self._core, self._settings.policy == "history"
        return asked_of(
            told, self._settings, self.served.scales, core.vocabulary, core.longest_prompt, records=records
        )

    def prepare(
        self,
        asked: Asked,
        epoch: int,
        wanted: Callable[[], None],
        done: Callable[[ScaleSet], None],
        then: Callable[[], Result],
    ) -> Result:
        """Give the twin, which is complete, the scales that it will be served with from `epoch` on; then go on. A job where
        tokens have to be looked at; `wanted` raises when nobody wants its scales any more."""
        if asked.policy in ("static", "history"):
            found = self.served if asked.policy == "static" else self._from_history(epoch)
            self._stage(found.scales)
            done(found)
            return then()
        core = self._core
        recent = core.recent_tokens()
        tokens = choose(asked.prompts, self._settings, recent, core.vocabulary, core.longest_prompt)
        finish = partial(self._observed, asked, tokens, epoch, wanted, done, then)
        return self._jobs.start(RankMethod.OBSERVE_KV, tokens.prompts, finish=finish)

    def _observed(
        self,
        asked: Asked,
        tokens: Tokens,
        epoch: int,
        wanted: Callable[[], None],
        done: Callable[[ScaleSet], None],
        then: Callable[[], Result],
        results: list[Result],
    ) -> Result:
        raise_first(results)
        wanted()
        seen = largest([result["amax"] for result in results])
        source = tokens.source
        if asked.scales is not None:
            scales, source = asked.scales, "trainer"
        else:
            scales = computed(seen, self.served.scales, self._settings)
        layers = layer_reports(self._stage(scales), seen, scales)
        found = ScaleSet(scales, asked.policy, epoch, source, tokens.count, layers)
        self._warn(layers, f"with scales from {source}")
        done(found)
        return then()

    def _stage(self, scales: Scales) -> list[Any]:
        results = self._core.ranks(RankMethod.KV_STAGE, scales)
        raise_first(results)
        return [result["fits"] for result in results]

    def _from_history(self, epoch: int) -> ScaleSet:
        """Scales for what was written into the cache before the commits that count, this one the last of them."""
        results = self._core.ranks(RankMethod.KV_RECORDED)
        raise_first(results)
        parts: list[Any] = [result["amax"] for result in results]
        written = [result["traffic"] for result in results]
        self.traffic = traffic_reports(written, largest(parts), self.served.scales)
        self._warn(self.traffic, f"as cached with scales of epoch {self.served.epoch}")
        self._recorded = largest([*parts, self._recorded] if self._recorded else parts)
        length = 1 if self._settings.history_algorithm == "most_recent" else self._settings.history_length
        amax = remembered([*self._history, self._recorded][-length:])
        scales = computed(amax, self.served.scales, self._settings)
        return ScaleSet(scales, "history", epoch, "history")

    def _warn(self, layers: dict[str, Any], how: str) -> None:
        for kind, told in (worst(layers) or {}).items():
            if told["saturated_fraction"] > self._settings.warn_saturated:
                logger.warning(
                    "fp8ext: %.3g of %s of %s is beyond the largest FP8 code %s; more than %g",
                    *(told["saturated_fraction"], kind.upper(), told["worst"], how),
                    self._settings.warn_saturated,
                )

    def exchanged(self, new: ScaleSet | None, *, keep: bool, cached: str) -> bool:
        """Served and staged scales were exchanged; `new` are those that are served now, by default the previous ones. With
        `keep`, cached K and V that running requests hold are rewritten; whether they have to be computed again instead."""
        if not self.enabled:
            return False
        self._rescaled = None
        old, self._served = self.served, new or self._previous
        self._previous = old
        if new is not None and self._recorded:
            self._history.append(self._recorded)
            self._recorded = {}
        if not keep or _cached_scales(self.served) == _cached_scales(old):
            return False
        if cached == "recompute":
            return True
        results = self._core.ranks(RankMethod.KV_RESCALE, self._core.held_blocks())
        failed = [result["error"] for result in results if "error" in result]
        if failed:
            told = "cached K and V could not be rewritten, they are computed again"
            logger.warning("fp8ext: %s: %s", told, failed[0])
            return True
        self._rescaled = {
            name: sum(result.get(name, 0) for result in results) for name in ("codes", "saturated", "flushed")
        }
        return False

    def describe(self, epoch: int, *, layers: bool = False) -> Result | None:
        """What is served: in short, or with scales and fit of every layer."""
        if not self.enabled:
            return None
        found = self.served.summary(epoch) | {
            "granularity": self._settings.granularity,
            "rescaled": self._rescaled,
            "traffic": worst(self.traffic),
        }
        if layers:
            served = self.served
            found |= {"scales": served.scales, "layers": served.layers, "traffic_layers": self.traffic}
        return found
