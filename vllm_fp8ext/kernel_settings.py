# SPDX-License-Identifier: Apache-2.0
"""The settings of kernels (`kernels` in a server's settings): how linear layers and experts are computed."""

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from vllm_fp8ext.kernels.gemm.registry import DECODE_GEMM
from vllm_fp8ext.kernels.moe.expert_configs import FUSED_KERNEL
from vllm_fp8ext.layers import gemm_kernels

logger = logging.getLogger("vllm.fp8ext")

OLD_KERNEL_SETTINGS = {
    "whole_graphs": "mixed_full_cudagraph",
    "steady_steps": "decode_step_reuse",
    "held_slots": "slot_fast_path",
}
"""New names of settings in `kernels`, by the old names. The next version refuses the old ones."""


def with_new_names(values: Mapping[str, Any], old_names: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """Replace settings' old names by the new ones, with a warning for each.

    Raises:
        ValueError: a setting has both its names.
    """
    renamed = dict(values)
    for old, new in old_names.items():
        if old not in renamed:
            continue
        if new in renamed:
            raise ValueError(f"{old} is the old name of {new}: expected one of them, found both")
        _warn_of_old_name(prefix + old, prefix + new)
        renamed[new] = renamed.pop(old)
    return renamed


@functools.cache
def _warn_of_old_name(old: str, new: str) -> None:
    """Warn once in a process: settings are parsed often."""
    logger.warning("fp8ext: the setting %s is called %s now; the next version refuses the old name", old, new)


def _gemm_kernel(name: str) -> str:
    return _one_of(name, gemm_kernels.names())


def _expert_kernel(name: str) -> str:
    return _one_of(name, gemm_kernels.expert_names())


def _one_of(name: str, names: Sequence[str]) -> str:
    if name not in names:
        expected = f"{', '.join(repr(other) for other in names[:-1])} or {names[-1]!r}"
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
    return name


class ShapeSettings(BaseModel):
    """Kernels that multiply by weights of one shape; what is not set is chosen by default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    decode_tokens: int | None = Field(default=None, ge=0, le=128)
    """Most tokens that go to the kernel for few tokens; 0: none."""

    gemm: Annotated[str, AfterValidator(_gemm_kernel)] | None = None
    """The kernel for more tokens: one of `vllm_fp8ext.layers.gemm_kernels`."""


class ExpertSettings(BaseModel):
    """Kernels that multiply by fused experts; what is not set is chosen by default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    fused_tokens: int | None = Field(default=None, ge=0)
    """Most tokens that go to the kernel for few tokens; 0: none."""

    triton_tokens: int | None = Field(default=None, ge=0)
    """Most tokens that go to vLLM's Triton kernel, beyond these; 0: none."""

    gemm: Annotated[str, AfterValidator(_expert_kernel)] | None = None
    """The kernel for more tokens: one of `vllm_fp8ext.layers.expert_kernels`."""


def _tokens(tokens: object) -> object:
    if tokens in (None, "auto") or (isinstance(tokens, int) and tokens >= 0 and not isinstance(tokens, bool)):
        return tokens
    raise ValueError('expected a number of tokens, 0 or more, or "auto"')


class KernelSettings(BaseModel):
    """How linear layers are computed on a GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shapes: dict[Annotated[str, Field(pattern=r"^(\*|[1-9]\d*x[1-9]\d*)$")], ShapeSettings] = Field(
        default={}
    )
    """Kernels by shape of a weight on one rank. A shape is `"NxK"`, output by input features; `"*"` stands for every
    other."""

    experts: ExpertSettings = ExpertSettings()
    """Kernels for mixtures of experts."""

    decode_attention: bool | Literal["all"] = True
    """Requests with one new token attend by our own kernel, where it takes the layers; else all by vLLM's. It takes heads of
    128, and with `"all"` heads of 64, 96 and 256, windows, soft caps and sinks too, which were not tried in engines."""

    norm_rope: bool = True
    """Fuse norms of heads, rotary embedding and the quantization of queries, in compiled graphs. Where our kernel does not
    take them, Inductor compiles them."""

    quantized_attention: bool = True
    """Let our decode attention write outputs quantized for the next layer, in compiled graphs. Else that layer quantizes
    them."""

    graph_tokens: Annotated[int | Literal["auto"] | None, BeforeValidator(_tokens)] = None
    """Largest step, in tokens, that replays CUDA graphs broken at attention, beyond vLLM's sizes; 0: none beyond. "auto":
    2048, or more for small layers. By default "auto", where the user leaves it to vLLM what is captured."""

    mixed_full_cudagraph: bool = True
    """Replay one CUDA graph, attention within, for steps with prompts whose contexts are short. They reach as far as those
    of `graph_tokens`, which are broken at attention."""

    decode_step_reuse: bool = True
    """Prepare a decode step by one kernel if the previous one had the same requests. If they use temperature only, its
    tokens are sampled in a CUDA graph."""

    slot_fast_path: bool = True
    """Answer the scheduler at once for requests that hold a slot for their next token. The KV cache is not asked."""

    batch_invariant: bool = Field(
        default_factory=lambda: os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
    )
    """One kernel path of linear layers and experts whatever the number of tokens: what they make of a token does not depend
    on what it is computed beside. All else is vLLM's then, attention too, which has a mode of its own for that
    (`VLLM_BATCH_INVARIANT`); where that is set, this is the default."""

    @model_validator(mode="before")
    @classmethod
    def _take_old_names(cls, values: Any) -> Any:
        return (
            with_new_names(values, OLD_KERNEL_SETTINGS, "kernels.") if isinstance(values, Mapping) else values
        )

    @model_validator(mode="after")
    def _one_kernel(self) -> Self:
        for shape, chosen in self.shapes.items():
            if self.batch_invariant and (chosen.decode_tokens or chosen.gemm == DECODE_GEMM):
                raise ValueError(f"batch_invariant leaves decode_gemm out, which shapes.{shape} asks for")
        if self.batch_invariant and (self.experts.fused_tokens or self.experts.gemm == FUSED_KERNEL):
            raise ValueError("batch_invariant leaves the kernel for few tokens out, which experts asks for")
        if self.batch_invariant and self.experts.triton_tokens:
            raise ValueError("batch_invariant takes one kernel, where experts.triton_tokens asks for two")
        return self

    @property
    def takes_decode_attention(self) -> bool:
        """Our own cuts contexts by what a step has of them: by nothing that is the same for every batch."""
        return bool(self.decode_attention) and not self.batch_invariant

    @property
    def takes_decode_step_reuse(self) -> bool:
        """Graphs that sample pad to their rows what vLLM multiplies by the output layer: not whatever the batch."""
        return self.decode_step_reuse and not self.batch_invariant

    def route(self, n: int, k: int) -> ShapeSettings:
        """Return what was chosen for a weight of `n` rows and `k` columns."""
        return self.shapes.get(f"{n}x{k}") or self.shapes.get("*") or ShapeSettings()
