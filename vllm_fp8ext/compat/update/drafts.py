# SPDX-License-Identifier: Apache-2.0
"""Tells which ways of speculative decoding go together with live updates."""

from typing import Any

from vllm_fp8ext.config import METHOD

FEATURE: str = "core"
WHY: str = "Refuse drafts that an update would not reach: vLLM loads them beside the served model."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "know where drafts come from": (
        "vllm.config.speculative:SpeculativeConfig.method",
        "vllm.config.speculative:SpeculativeConfig.quantization",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "updates bring the weights of every draft model"

WITHOUT_WEIGHTS: tuple[str, ...] = ("ngram", "suffix")
"""Methods whose drafts are looked up in tokens that were there before: no weights make them."""
KEPT = "draft_model"
"""The method whose model can keep its weights: it has none in common with the served one."""


def unsupported_drafts(speculative: Any, draft_weights: str) -> str | None:
    """Say why a `SpeculativeConfig` can't go together with live updates; None if it can.

    `draft_weights`: the setting.
    """
    if speculative.method in WITHOUT_WEIGHTS:
        return None
    option, instead = f"--speculative-config with method {speculative.method}", "or method ngram or suffix"
    if speculative.method != KEPT:
        return (
            f"{option}: it drafts from states and layers of the served model, which was not tried with updates; expected a "
            f"draft model of its own with draft_weights keep, {instead}"
        )
    if draft_weights != "keep":
        return (
            f"{option}: no update brings the weights of a draft model; expected draft_weights keep, with which they stay as "
            f"they were loaded, {instead}"
        )
    if speculative.quantization == METHOD:
        return (
            f"{option} in {METHOD}: expected a draft model in 16 bits, which is as fast where steps are small"
        )
    return None
