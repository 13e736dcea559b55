# SPDX-License-Identifier: Apache-2.0
"""Settings for the scales of an FP8 KV cache. Imports neither torch nor vLLM."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Policy = Literal["calibrate", "history", "provided", "static"]
Cached = Literal["rescale", "recompute"]
Prompt = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)]

CALIBRATION_TOKENS = 4096
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**118
"""Bounds of a scale: one over it and 448 times it are normal numbers in fp32."""


class KvScaleSettings(BaseModel):
    """`kv_scales` of `--additional-config`; a string is the policy alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: Policy
    """`calibrate`: an update's scales come from running tokens through its weights before it is served. `history`: from
    what was written into the cache, at the next commit. `provided`: the trainer sends them. `static`: the checkpoint's, for
    ever."""

    granularity: Literal["layer", "head"] = "layer"
    """One scale each for Q, K and V, by layer or by KV head. Scales by head need FlashAttention 3."""

    scale_format: Literal["fp32", "pow2"] = "pow2"
    """Format of the scales: `amax * 2**margin / 448`, or the smallest power of two that is not below it."""

    margin: float = Field(default=1.0, ge=0, le=8)
    """Powers of two left for values larger than those that were seen."""

    prompts: Annotated[tuple[Prompt, ...], Field(strict=False, min_length=1, max_length=64)] | None = None
    """Token ids to calibrate with. By default what was served last, and a built-in sample before there is enough of it."""

    tokens: int = Field(default=CALIBRATION_TOKENS, ge=16, le=1 << 16)
    """Most tokens to calibrate with."""

    history_length: int = Field(default=16, ge=1, le=1024)
    """Number of commits whose recorded amax is remembered."""

    history_algorithm: Literal["max", "most_recent"] = "max"
    """Rule by which remembered values are combined."""

    record_every: int = Field(default=8, ge=1)
    """With `history`: one step in so many is looked at."""

    cached: Cached = "rescale"
    """Treatment of K and V that running requests keep when scales change: rewritten in place, or computed again."""

    default: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """With `static`: the scale of K and V of layers for which the checkpoint has none. Without it they are an error at
    start."""

    warn_saturated: float = Field(default=0.001, ge=0, le=1)
    """Warn if a larger part of a layer's K or V is saturated."""

    @model_validator(mode="after")
    def _default_is_for_static(self) -> Self:
        if self.default is not None and self.policy != "static":
            raise ValueError(f"default is for the policy static, found {self.policy}")
        if self.default is not None and not SMALLEST_SCALE <= self.default <= LARGEST_SCALE:
            raise ValueError(f"default: expected a number from 2**-126 to 2**118, found {self.default}")
        return self

    @model_validator(mode="after")
    def _prompts_are_taken_whole(self) -> Self:
        total = sum(map(len, self.prompts or ()))
        if total > self.tokens:
            raise ValueError(
                f"prompts: expected at most {self.tokens} tokens in all (`tokens`), found {total}"
            )
        return self


def spelled_out(value: Any) -> Any:
    """A policy's name as an object."""
    return {"policy": value} if isinstance(value, str) else value


KvScalesSetting = Annotated[KvScaleSettings, BeforeValidator(spelled_out)]
