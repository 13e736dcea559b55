# SPDX-License-Identifier: Apache-2.0
"""Parts of answers about the scales of the FP8 KV cache."""

from typing import Literal

from pydantic import BaseModel, Field


class Fit(BaseModel):
    """How well scales fitted K or V of the tokens that were looked at."""

    saturated_fraction: float = Field(description="Of the values, beyond the largest code.")
    relative_error: float = Field(description="‖x - dequantized‖ / ‖x‖.")
    headroom: float = Field(
        description="Powers of two from the largest value that was seen to the largest code."
    )


class WorstFit(Fit):
    """The worst of all layers."""

    worst: str = Field(description="The layer with the largest saturated fraction.")


class Traffic(BaseModel):
    """K or V that was written into the cache."""

    saturated_fraction: float = Field(description="Beyond the largest code.")
    headroom: float = Field(description="Powers of two from the largest value to the largest code.")


class WorstTraffic(Traffic):
    """The worst of all layers."""

    worst: str = Field(description="The layer with the largest saturated fraction.")


class Rescaled(BaseModel):
    """Cached codes that were rewritten at the last commit or rollback."""

    codes: int
    saturated: int = Field(description="Clamped to the largest code.")
    flushed: int = Field(description="Of other values than zero, now zero.")


class KvScalesSummary(BaseModel):
    """Scales of the FP8 KV cache, in short."""

    policy: Literal["calibrate", "history", "provided", "static"]
    source: str = Field(
        description="`update`, `settings`, `recent` or `built-in`: whose tokens they were calibrated with; else `history`, "
        "`trainer`, or `start` for those of the checkpoint or the setting `default`."
    )
    tokens: int = Field(description="How many of them were looked at.")
    epoch: int = Field(description="The weights that they were computed for.")
    age: int = Field(description="Epochs since then.")
    granularity: Literal["layer", "head"] | None = None
    fit: dict[str, WorstFit] | None = Field(description="Of `k` and `v`; null when nothing was looked at.")
    traffic: dict[str, WorstTraffic] | None = Field(
        None,
        description="With `history`, of `k` and `v` that were written before the last update, with the previous scales.",
    )
    rescaled: Rescaled | None = Field(
        None, description="With running requests that kept their K and V, when scales changed."
    )


class KvScalesServed(KvScalesSummary):
    """`GET /weights/kv-scales`."""

    scales: dict[str, dict[str, list[float]]] = Field(description="By attention layer, of `q`, `k` and `v`.")
    layers: dict[str, dict[str, Fit]] = Field(description="By attention layer, of `k` and `v`.")
    traffic_layers: dict[str, dict[str, Traffic]] = Field(
        {}, description="`traffic` by attention layer, where something was written."
    )
