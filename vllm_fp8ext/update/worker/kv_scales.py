# SPDX-License-Identifier: Apache-2.0
"""The FP8 KV cache of one rank: its scales, observed queries, keys and values, and the cached codes.

Part of `update.worker.rank.Rank` (`kv`), and like it called on the worker's main thread; methods that the engine calls do
not raise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_fp8ext.errors import errors_as_results
from vllm_fp8ext.kernels.attention.kv_amax import AmaxCounts, K, Q, V
from vllm_fp8ext.kernels.attention.kv_cache import next_scales
from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.kv_types import RankScales, Scales
from vllm_fp8ext.update.contract.kv_merge import largest
from vllm_fp8ext.update.contract.kv_tokens import Tokens
from vllm_fp8ext.update.contract.rank_results import (
    Calibration,
    Fits,
    KvAmax,
    KvFits,
    KvRescaled,
    KvTraffic,
    ServedKvScales,
)
from vllm_fp8ext.update.worker.cooperative_task import Pause
from vllm_fp8ext.update.worker.kv_buffers import KvScaleBuffers
from vllm_fp8ext.update.worker.kv_observer import KvObserver
from vllm_fp8ext.update.worker.score_prompts import AttachAttention, observe_kv

Result = dict[str, Any]
GatherScales = Callable[[RankScales], list[RankScales]]
"""Returns every rank's scales, given this one's; all ranks call it together."""


class AmaxRecorder(Protocol):
    """Notes amax where the cache is written (`compat.update.kv_recorder`)."""

    def take(self) -> dict[str, AmaxCounts]: ...


class Cache(Protocol):
    """The cached codes (`compat.update.kv_rescale`)."""

    def warm_up(self) -> None: ...

    def rescale(self, ratios: dict[str, dict[str, list[float]]], held: list[Result]) -> dict[str, int]: ...


@dataclass
class RankKv:
    """The FP8 KV cache of one rank. `cache` and `recorder` reach into vLLM; without a recorder nothing is recorded."""

    scales: KvScaleBuffers
    settings: KvScaleSettings
    cache: Cache
    recorder: AmaxRecorder | None = None
    observer: KvObserver | None = None
    calibration: Calibration | None = None
    """Tokens that the first scales were calibrated with, and how well these fit (`begin`)."""

    @property
    def per_head(self) -> bool:
        """True when each KV head has a scale of its own."""
        return self.settings.granularity == "head"

    def warm_up(self) -> None:
        """Compile the kernels of `rescale`, unless scales stay: caches may have other layouts then."""
        if self.settings.policy != "static":
            self.cache.warm_up()

    def observation(
        self,
        model: Any,
        device: torch.device,
        attach_attention: AttachAttention,
        prompts: list[list[int]],
    ) -> Callable[[Pause], KvAmax]:
        """Return a task that runs prompts through a model and returns `amax` by layer."""
        observer = self.observer = KvObserver(per_head=self.per_head)

        def see(layer: str, *heads: Tensor) -> None:
            if layer in self.scales:
                observer.see(layer, *heads)

        def work(pause: Pause) -> KvAmax:
            observe_kv(model, prompts, device, attach_attention, see, pause)
            with torch.inference_mode():
                return KvAmax(amax=observer.amax(self.scales.spread))

        return work

    def begin(
        self,
        model: Any,
        device: torch.device,
        attach_attention: AttachAttention,
        tokens: Tokens,
        gather: GatherScales,
    ) -> None:
        """Serve the scales that fit these tokens, before anything is cached."""
        observed = self.observation(model, device, attach_attention, tokens.prompts)(lambda: None)
        served, amax = largest(gather(self.scales.served())), largest(gather(observed.amax))
        scales = computed(amax, served, self.settings)
        fits = self._stage(scales)
        self.scales.swap()
        self.scales.stage(scales)
        self.calibration = Calibration(amax=amax, source=tokens.source, tokens=tokens.count, fits=fits)

    @errors_as_results
    def served(self) -> ServedKvScales:
        """Return the scales that are served, and how the first ones were calibrated."""
        return ServedKvScales(scales=self.scales.served(), calibration=self.calibration)

    @errors_as_results
    def stage(self, scales: Scales) -> KvFits:
        """Give the shadow scales; return how well they fit what was observed since the last time."""
        return KvFits(fits=self._stage(scales))

    def _stage(self, scales: Scales) -> Fits:
        observer, self.observer = self.observer, None
        with torch.inference_mode():
            self.scales.stage(scales)
            return observer.fits(self.scales) if observer else {}

    def restore(self) -> None:
        """Put scales back into memory that lost its contents, and forget what was recorded."""
        self.scales.restore()
        if self.recorder is not None:
            self.recorder.take()

    @errors_as_results
    def recorded(self) -> KvTraffic:
        """Return what was written into the cache since the last call.

        `amax` by layer, and how many `elements` of K and V there were and how many of them were `saturated`.
        """
        with torch.inference_mode():
            taken = self.recorder.take() if self.recorder else {}
        amax: RankScales = {}
        traffic: dict[str, dict[str, dict[str, int]]] = {}
        for layer, seen in taken.items():
            for kind, index in (("q", Q), ("k", K), ("v", V)):
                values = seen.amax[index] if self.per_head else seen.amax[index].max()[None]
                amax.setdefault(layer, {})[kind] = self.scales.spread(layer, values.tolist())
                if kind != "q":
                    elements = int(seen.elements[index]) * seen.amax.shape[1]
                    counts = {"elements": elements, "saturated": int(seen.saturated[index].sum())}
                    traffic.setdefault(layer, {})[kind] = counts
        return KvTraffic(amax=amax, traffic=traffic)

    @errors_as_results
    def rescale(self, held: list[Result]) -> KvRescaled:
        """Rescale codes cached in these blocks, so that they keep their meaning after a swap.

        `held`: blocks of each group of layers.
        """
        ratios = self.scales.ratios()
        with torch.inference_mode():
            return KvRescaled(**self.cache.rescale(ratios, held)) if ratios else KvRescaled()


def computed(amax: Scales, served: Scales, settings: KvScaleSettings) -> Scales:
    """Compute scales for these magnitudes; where a layer has none, served scales stay."""
    now: list[float] = []
    seen: list[float] = []
    for layer, kinds in served.items():
        for kind, values in kinds.items():
            now += values
            seen += amax.get(layer, {}).get(kind, [0.0] * len(values))
    scales = next_scales(
        torch.tensor(seen), torch.tensor(now), margin=settings.margin, scale_format=settings.scale_format
    )
    values_left = iter(scales.tolist())
    return {
        layer: {kind: [next(values_left) for _ in values] for kind, values in kinds.items()}
        for layer, kinds in served.items()
    }
