# SPDX-License-Identifier: Apache-2.0
"""KV-cache scales of an update, and the cached K and V when it is served."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from vllm_fp8ext.config import Settings
from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.kv_types import Scales
from vllm_fp8ext.update.contract.kv_merge import largest, remembered
from vllm_fp8ext.update.contract.kv_request import KvRequest, kv_request_of
from vllm_fp8ext.update.contract.kv_tokens import choose
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import (
    Fits,
    KvAmax,
    KvFits,
    KvRescaled,
    KvTraffic,
    RankResult,
    ServedKvScales,
    all_of,
    failures,
)
from vllm_fp8ext.update.contract.results import ServedScales
from vllm_fp8ext.update.engine.jobs import Flow, OnRanks
from vllm_fp8ext.update.engine.kv_report import layer_reports, traffic_reports, worst
from vllm_fp8ext.update.worker.kv_scales import computed

logger = logging.getLogger("vllm.fp8ext")


class KvCore(Protocol):
    """Interface of an engine core for KV-cache scales."""

    settings: Settings
    kv_cache_dtype: str
    vocabulary: int
    longest_prompt: int

    def ranks(self, method: RankMethod, *args: Any) -> list[RankResult]: ...
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

    def summary(self, epoch: int) -> dict[str, Any]:
        """In short, while `epoch` is served."""
        return {
            "policy": self.policy,
            "source": self.source,
            "tokens": self.tokens,
            "epoch": self.epoch,
            "age": epoch - self.epoch,
            "fit": worst(self.layers),
        }


def _first(parts: list[ServedKvScales]) -> ScaleSet:
    """Return the scales that the server was started with."""
    scales = largest([part.scales for part in parts])
    calibrations = [part.calibration for part in parts if part.calibration is not None]
    if not calibrations:
        return ScaleSet(scales, "static", 0, "start")
    first = calibrations[0]
    layers = layer_reports([each.fits for each in calibrations], first.amax, scales)
    return ScaleSet(scales, "calibrate", 0, first.source, first.tokens, layers)


def _cached_scales(scale_set: ScaleSet) -> list[list[float]]:
    """Return the scales by which K and V are cached: queries are not."""
    return [kinds[kind] for kinds in scale_set.scales.values() for kind in ("k", "v")]


class KvEngine:
    """The scales of an engine. Without an FP8 KV cache, or without updates, there are none (`enabled`)."""

    def __init__(self, core: KvCore) -> None:
        self._core = core
        settings = core.settings.kv_scales
        self.enabled = (
            core.kv_cache_dtype.startswith("fp8") and settings is not None and core.settings.staging != "none"
        )
        self._settings = settings or KvScaleSettings(policy="static")
        self._served: ScaleSet | None = None
        self._previous: ScaleSet | None = None
        self.traffic: dict[str, Any] = {}
        """Report of what was recorded before the last update (`kv_report.traffic_reports`)."""
        self._rescaled: dict[str, int] | None = None
        """Counts of cached codes that the last swap rewrote."""
        self._history: deque[Scales] = deque(maxlen=self._settings.history_length)
        """Largest values that were recorded before each commit."""
        self._recorded: Scales = {}
        """Largest values since the last commit: an update that is given up does not lose them."""

    @property
    def policy(self) -> str:
        """Return who computes scales where an update does not say."""
        return self._settings.policy

    @property
    def served(self) -> ScaleSet:
        """Return the served scales."""
        if self._served is None:
            self._served = _first(all_of(ServedKvScales, self._core.ranks(RankMethod.KV_SERVED)))
            self._warn(self._served.layers, f"with scales from {self._served.source}")
        return self._served

    def request(self, fields: Any) -> KvRequest | None:
        """Return what an update asks for. Raises `UpdateError` (`invalid-request`)."""
        if not self.enabled:
            return None
        core, records = self._core, self._settings.policy == "history"
        return kv_request_of(
            fields, self._settings, self.served.scales, core.vocabulary, core.longest_prompt, records=records
        )

    def prepare(self, request: KvRequest, epoch: int, require_wanted: Callable[[], None]) -> Flow[ScaleSet]:
        """Give the complete shadow the scales that it will be served with from `epoch` on.

        `require_wanted` raises when nobody wants them any more.
        """
        if request.policy in ("static", "history"):
            scale_set = self.served if request.policy == "static" else self._from_history(epoch)
            self._stage(scale_set.scales)
            return scale_set
        core = self._core
        recent = core.recent_tokens()
        tokens = choose(request.prompts, self._settings, recent, core.vocabulary, core.longest_prompt)
        results = all_of(KvAmax, (yield OnRanks(RankMethod.OBSERVE_KV, tokens.prompts)))
        require_wanted()
        seen = largest([result.amax for result in results])
        source = tokens.source
        if request.scales is not None:
            scales, source = request.scales, "trainer"
        else:
            scales = computed(seen, self.served.scales, self._settings)
        layers = layer_reports(self._stage(scales), seen, scales)
        self._warn(layers, f"with scales from {source}")
        return ScaleSet(scales, request.policy, epoch, source, tokens.count, layers)

    def _stage(self, scales: Scales) -> list[Fits]:
        results = self._core.ranks(RankMethod.KV_STAGE, scales)
        return [result.fits for result in all_of(KvFits, results)]

    def _from_history(self, epoch: int) -> ScaleSet:
        """Compute scales for what the cache took before the commits that count, this one included."""
        results = all_of(KvTraffic, self._core.ranks(RankMethod.KV_RECORDED))
        parts: list[Any] = [result.amax for result in results]
        written = [result.traffic for result in results]
        self.traffic = traffic_reports(written, largest(parts), self.served.scales)
        self._warn(self.traffic, f"as cached with scales of epoch {self.served.epoch}")
        self._recorded = largest([*parts, self._recorded] if self._recorded else parts)
        length = 1 if self._settings.history_algorithm == "most_recent" else self._settings.history_length
        amax = remembered([*self._history, self._recorded][-length:])
        scales = computed(amax, self.served.scales, self._settings)
        return ScaleSet(scales, "history", epoch, "history")

    def _warn(self, layers: dict[str, Any], how: str) -> None:
        for kind, fit in (worst(layers) or {}).items():
            if fit["saturated_fraction"] > self._settings.warn_saturated:
                logger.warning(
                    "fp8ext: %.3g of %s of %s is beyond the largest FP8 code %s; more than %g",
                    *(fit["saturated_fraction"], kind.upper(), fit["worst"], how),
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
        failed = failures(results)
        if failed:
            message = "cached K and V could not be rewritten, they are computed again"
            logger.warning("fp8ext: %s: %s", message, failed[0])
            return True
        counts = [asdict(result) for result in all_of(KvRescaled, results)]
        self._rescaled = {name: sum(each[name] for each in counts) for name in counts[0]}
        return False

    def describe(self, epoch: int) -> dict[str, Any] | None:
        """Return what is served, in short."""
        if not self.enabled:
            return None
        return self.served.summary(epoch) | {
            "granularity": self._settings.granularity,
            "rescaled": self._rescaled,
            "traffic": worst(self.traffic),
        }

    def report(self, epoch: int) -> ServedScales | None:
        """Return what is served, with scales and fit of every layer."""
        summary = self.describe(epoch)
        if summary is None:
            return None
        scale_set = self.served
        return ServedScales(
            **summary, scales=scale_set.scales, layers=scale_set.layers, traffic_layers=self.traffic
        )
