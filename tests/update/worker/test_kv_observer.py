# SPDX-License-Identifier: Apache-2.0
"""What is seen of one pass, and how well scales fit it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from update.layers import CPU, layers
from vllm_fp8ext.kernels.attention.kv_cache import fit
from vllm_fp8ext.kv_types import HeadShare
from vllm_fp8ext.update.worker.kv_buffers import KvScaleBuffers
from vllm_fp8ext.update.worker.kv_observer import SAMPLE_TOKENS, KvObserver

HEADS, GROUPS, SIZE = 6, 2, 4


def qkv(tokens: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(tokens)
    return tuple(  # type: ignore[return-value]  # three of them
        (torch.randn(tokens, heads, SIZE, generator=noise) * 5).bfloat16()
        for heads in (HEADS, GROUPS, GROUPS)
    )


def alone(_: str, values: list[float]) -> list[float | None]:
    return [*values]


def test_one_number_of_a_layer() -> None:
    observer = KvObserver(per_head=False)
    q, k, v = qkv()
    observer.see("a", q, k, v)
    observer.see("b", q * 2, k * 2, v * 2)
    expected = {kind: [float(part.abs().max())] for kind, part in zip("qkv", (q, k, v), strict=True)}
    assert observer.amax(alone) == {
        "a": expected,
        "b": {kind: [2 * value] for kind, [value] in expected.items()},
    }


def test_one_number_of_a_head_and_of_the_queries_that_attend_to_it() -> None:
    observer = KvObserver(per_head=True)
    q, k, v = qkv()
    observer.see("a", q, k, v)
    assert observer.amax(alone) == {
        "a": {
            "q": [float(q[:, :3].abs().max()), float(q[:, 3:].abs().max())],
            "k": [float(k[:, 0].abs().max()), float(k[:, 1].abs().max())],
            "v": [float(v[:, 0].abs().max()), float(v[:, 1].abs().max())],
        }
    }


def test_numbers_are_spread_over_the_heads_of_all_ranks() -> None:
    share = HeadShare(2, GROUPS, 6)
    kv = KvScaleBuffers(layers("a", heads=GROUPS), {"a": share}, device=CPU)
    observer = KvObserver(per_head=True)
    observer.see("a", *qkv())
    result = observer.amax(kv.spread)["a"]["k"]
    assert [value is None for value in result] == [True, True, False, False, True, True]


def test_a_model_without_such_layers() -> None:
    assert KvObserver(per_head=False).amax(alone) == {}


def test_what_is_not_finite_is_told() -> None:
    observer = KvObserver(per_head=False)
    q, k, v = qkv()
    k[3, 1, 2], v[299, 0, 0] = math.inf, math.nan
    observer.see("a", q, k, v)
    result = observer.amax(alone)["a"]
    assert result["k"] == [math.inf]
    assert math.isnan(result["v"][0] or 0.0)


@pytest.mark.parametrize("tokens", [1, SAMPLE_TOKENS, SAMPLE_TOKENS + 1, 1000])
def test_a_sample_of_all_tokens_is_kept(tokens: int) -> None:
    """Of K and V; the tensors themselves belong to the model, which may write over them."""
    observer = KvObserver(per_head=False)
    q, k, v = qkv(tokens)
    observer.see("a", q, k, v)
    step = math.ceil(tokens / SAMPLE_TOKENS)
    sampled = {"k": k[::step].clone(), "v": v[::step].clone()}
    k.zero_()
    v.zero_()
    kv = KvScaleBuffers(layers("a"), {}, device=CPU)
    kv.stage({"a": {"q": [1.0], "k": [2.0**-7], "v": [2.0**-9]}})
    result: Any = observer.fits(kv)
    assert result.keys() == {"a"}
    assert result["a"].keys() == {"k", "v"}
    assert len(sampled["k"]) <= SAMPLE_TOKENS
    assert result["a"]["k"] == vars(fit(sampled["k"], torch.tensor([2.0**-7])))
    assert result["a"]["v"] == vars(fit(sampled["v"], torch.tensor([2.0**-9])))
    assert result["a"]["k"] != result["a"]["v"]


def test_a_fit_is_that_of_the_shadows_scales() -> None:
    observer = KvObserver(per_head=False)
    observer.see("a", *qkv())
    kv = KvScaleBuffers(layers("a"), {}, device=CPU)
    kv.stage({"a": {kind: [2.0**-7] for kind in "qkv"}})
    assert observer.fits(kv)["a"]["k"]["saturated"] > 0
    kv.swap()
    assert observer.fits(kv)["a"]["k"]["saturated"] == 0
