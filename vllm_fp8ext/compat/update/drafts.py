# SPDX-License-Identifier: Apache-2.0
"""Tells which ways of speculative decoding go together with live updates."""

from typing import Any

FEATURE: str = "core"
WHY: str = "Refuse drafts that an update would not reach: vLLM loads them beside the served model."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "know where drafts come from": ("vllm.config.speculative:SpeculativeConfig.method",),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "updates bring the weights of every draft model"

WITHOUT_WEIGHTS: tuple[str, ...] = ("ngram", "suffix")
"""Methods whose drafts are looked up in tokens that were there before: no weights make them."""


def unsupported_drafts(speculative: Any) -> str | None:
    """Say why a `SpeculativeConfig` can't go together with live updates; None if it can."""
    if speculative.method in WITHOUT_WEIGHTS:
        return None
    return (
        f"--speculative-config with method {speculative.method}: its draft model would keep its old weights; expected method "
        f"{' or '.join(WITHOUT_WEIGHTS)}, whose drafts need none"
    )
