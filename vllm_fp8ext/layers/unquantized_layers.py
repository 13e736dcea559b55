# SPDX-License-Identifier: Apache-2.0
"""Decides which linear layers stay in 16 bits unless settings ask for them.

They are those of encoders beside the language model, those that decide the decay of states, and those of shapes that FP8
kernels do not take for many tokens.

Names, shapes and settings decide, never the device: a CPU, a GPU and `fp8ext digest` choose alike. Imports no vLLM.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextvars import ContextVar

from vllm_fp8ext.config import SECTION
from vllm_fp8ext.kernels.gemm.registry import COLUMNS_MULTIPLE
from vllm_fp8ext.layers.gemm_kernels import rows_multiple

ENCODERS = frozenset(
    {
        *("visual", "vision_tower", "vision_model", "vision_encoder", "vision_backbone", "image_encoder"),
        *("audio_tower", "audio_encoder", "encoder"),
    }
)
"""Names that multimodal models give the modules that read images or sound."""
ENCODER = "parts of an encoder beside the language model"
DECAYS = frozenset({"in_proj_ba", "in_proj_a", "in_proj_b"})
"""Names of projections of Gated DeltaNet: they decide what a state forgets, and what a token adds."""
DECAY = "few rows, on which what a state forgets depends at every token"

building_encoder: ContextVar[bool] = ContextVar("fp8ext_building_encoder", default=False)
"""True while a model builds an encoder; `compat.update.encoder_layers` sets it."""


def in_encoder(name: str) -> bool:
    """Tell by its name whether a layer of a multimodal model belongs to an encoder."""
    return not ENCODERS.isdisjoint(name.split("."))


def decides_decay(name: str) -> bool:
    """Tell by its name whether a layer computes the decay of linear attention's states."""
    return name.rpartition(".")[2] in DECAYS


def unfit(rows: int, columns: int, dtype: str) -> str | None:
    """Say why a weight of this shape on one rank stays in 16 bits; None if kernels take it. `dtype`: torch's name."""
    multiple = rows_multiple(dtype)
    if rows % multiple == 0 and columns % COLUMNS_MULTIPLE == 0:
        return None
    return (
        f"of {rows}x{columns}: FP8 kernels for many tokens take multiples of {multiple} rows and "
        f"{COLUMNS_MULTIPLE} columns"
    )


def report(kept: Mapping[str, Iterable[str]]) -> list[str]:
    """Describe layers by the reason why they are kept, a line for each reason."""
    lines = []
    for reason, names in sorted(kept.items()):
        patterns = Counter(_pattern(name) for name in names)
        listed = ", ".join(f"{pattern} ({count})" for pattern, count in sorted(patterns.items()))
        section = json.dumps({SECTION: {"quantize": sorted(patterns)}})
        lines.append(
            f"blockfp8 keeps {patterns.total()} layers in 16 bits, {reason}: {listed}. To serve them in FP8: "
            f"--additional-config '{section}'"
        )
    return lines


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
