# SPDX-License-Identifier: Apache-2.0
"""Requests of updates for their KV-cache scales."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kv_settings import LARGEST_SCALE, SMALLEST_SCALE, Cached, KvScaleSettings, Policy
from vllm_fp8ext.kv_types import NAMES, Scales
from vllm_fp8ext.update.contract.prompts import require_prompts


@dataclass(frozen=True)
class KvRequest:
    """`prompts`: token ids to calibrate with; `scales`: those that the trainer sends."""

    policy: Policy
    cached: Cached
    prompts: Sequence[Sequence[int]] | None = None
    scales: Scales | None = None


def kv_request_of(
    fields: Mapping[str, Any] | None,
    settings: KvScaleSettings,
    served: Scales,
    vocabulary: int,
    longest: int,
    *,
    records: bool,
) -> KvRequest:
    """Return what an update asks for, with the server's `settings` where it says nothing.

    `served`: the scales of now; `records`: whether a history is kept.

    Raises:
        UpdateError: `invalid-request`: a policy that this server can't follow, prompts that are no prompts, scales that are
            missing, unknown, out of range, or not as many as expected.
    """
    fields = fields or {}
    policy = cast("Policy", fields.get("policy") or settings.policy)
    cached = cast("Cached", fields.get("cached") or settings.cached)
    prompts, scales = fields.get("prompts"), fields.get("scales")
    if prompts and policy != "calibrate":
        raise _invalid(f"prompts are for the policy calibrate, found {policy}")
    if (scales is not None) != (policy == "provided"):
        raise _invalid(f"scales and the policy provided go together, found the policy {policy}")
    if settings.policy == "static" and policy != "static":
        raise _invalid(f"the server was started with the policy static, which stays; found {policy}")
    if policy == "history" and not records:
        raise _invalid("nothing is recorded: the server has to be started with the policy history")
    check_prompts(prompts or (), settings, vocabulary, longest)
    return KvRequest(policy, cached, prompts, None if scales is None else _completed(scales, served))


def check_prompts(
    prompts: Sequence[Sequence[int]], settings: KvScaleSettings, vocabulary: int, longest: int
) -> None:
    """Raises `UpdateError` (`invalid-request`): token ids or lengths that the model does not take, too many tokens."""
    require_prompts("kv_scales", prompts, vocabulary, longest)
    total = sum(map(len, prompts))
    if total > settings.tokens:
        raise _invalid(f"prompts: expected at most {settings.tokens} tokens in all, found {total}")


def _completed(scales: Mapping[str, Mapping[str, Any]], served: Scales) -> Scales:
    """In fp32. One number for a layer counts for all its heads; scales of Q that are not sent stay as they are."""
    unknown, missing = sorted(scales.keys() - served.keys()), sorted(served.keys() - scales.keys())
    if unknown or missing:
        raise _invalid(
            f"scales: missing layers {missing}, unknown layers {unknown}; expected {sorted(served)}"
        )
    completed: Scales = {}
    for layer, now in served.items():
        completed[layer] = {}
        for kind in NAMES:
            values = scales[layer].get(kind)
            if values is None and kind != "q":
                raise _invalid(f"scales: {layer} has no {kind}")
            listed = torch.tensor(now[kind] if values is None else values, dtype=torch.float32).reshape(-1)
            heads = len(now[kind])
            if len(listed) not in (1, heads):
                raise _invalid(f"scales: {layer}.{kind}: expected 1 or {heads} numbers, found {len(listed)}")
            if not bool(((listed >= SMALLEST_SCALE) & (listed <= LARGEST_SCALE)).all()):
                raise _invalid(
                    f"scales: {layer}.{kind}: expected numbers from 2**-126 to 2**118, found {values}"
                )
            completed[layer][kind] = listed.expand(heads).tolist()
    return completed


def _invalid(message: str) -> UpdateError:
    return UpdateError("invalid-request", f"kv_scales: {message}", status=422)
