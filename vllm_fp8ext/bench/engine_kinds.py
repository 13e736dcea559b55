# SPDX-License-Identifier: Apache-2.0
"""Kinds of engines that benchmarks compare: a variant, its KV cache, and settings of ours."""

import argparse
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_fp8ext.bench.engines import VARIANTS, with_graphs
from vllm_fp8ext.bench.options import json_object

STEP = 8192
"""Most tokens of a step."""
NOTHING = "{}"
"""No settings, or no drafts, as JSON."""


class Kind(NamedTuple):
    """Identity of an engine: a variant, its KV cache, `settings` of ours and `drafts`, both as JSON.

    `drafts`: vLLM's configuration of speculative decoding, empty without.
    """

    variant: str
    kv: str
    settings: str = NOTHING
    drafts: str = NOTHING

    def __str__(self) -> str:
        more = "".join(f", {text}" for text in (self.settings, self.drafts) if text != NOTHING)
        return f"{self.variant}, KV {self.kv}{more}"


def kinds(
    variants: Sequence[str],
    caches: Sequence[str],
    settings: Sequence[str],
    drafts: Sequence[str] = (NOTHING,),
) -> list[Kind]:
    """Engines of each variant with each KV cache and each of `drafts`; of ours with each of the `settings`, as JSON."""
    return [
        Kind(name, kv, one, draft)
        for kv in caches
        for name in variants
        for one in (dict.fromkeys(settings) if name == "blockfp8" else [NOTHING])
        for draft in dict.fromkeys(drafts)
    ]


def settings_of(text: str) -> str:
    """The same JSON for the same settings."""
    return json.dumps(json_object(text), sort_keys=True)


def arguments(kind: Kind, longest: int, kv_gib: float, more: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `vllm.LLM`; `longest`: tokens of a request, `more`: other arguments."""
    scales = {"kv_scales": {"policy": "static", "default": 1.0}} if kind.kv == "fp8" else {}
    settings = with_graphs({**scales, **json.loads(kind.settings)})
    return {
        **VARIANTS[kind.variant],
        "kv_cache_dtype": kind.kv,
        "max_model_len": longest + 16,
        "max_num_seqs": 256,
        "max_num_batched_tokens": STEP,
        "kv_cache_memory_bytes": int(kv_gib * 2**30),
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        **(
            {"speculative_config": json.loads(kind.drafts), "disable_log_stats": False}
            if kind.drafts != NOTHING
            else {}
        ),
        **({"additional_config": {"fp8ext": settings}} if kind.variant == "blockfp8" else {}),
        **more,
    }


def said(options: argparse.Namespace, case: tuple[int, int, int], kind: Kind) -> dict[str, Any]:
    """Return the identity of a case; `options`: with `shape`, `checkpoint` and `engine`."""
    requests, tokens, output = case
    return {
        "model": options.checkpoint.name if options.checkpoint else options.shape,
        "requests": requests,
        "input": tokens,
        "output": output,
        "kv_cache": kind.kv,
        "settings": json.loads(kind.settings),
        **({"drafts": json.loads(kind.drafts)} if kind.drafts != NOTHING else {}),
        "engine": options.engine,
        "variant": kind.variant,
    }
