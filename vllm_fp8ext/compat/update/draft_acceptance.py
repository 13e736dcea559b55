# SPDX-License-Identifier: Apache-2.0
"""Counts by epoch which drafts of speculative decoding the served weights accept.

A draft model that keeps its weights drifts away from weights that are updated: outputs stay those of the served weights, and
fewer drafts are accepted. Replaced on an instance: what the scheduler counts a request's drafts with in each step.
"""

import logging
from dataclasses import asdict, dataclass
from typing import Any

from vllm_fp8ext.compat.wrapping import wrap_instance

FEATURE: str = "core"
WHY: str = "Tell how many drafts each epoch accepts: vLLM counts those of all weights together."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats("
    "spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's metrics of drafts have weight versions"

logger = logging.getLogger("vllm.fp8ext")


@dataclass
class DraftCounts:
    """Drafts that one epoch's weights checked.

    `drafts`: how many, one for each request and step; `draft_tokens`: tokens in them; `accepted_tokens`: those kept.
    """

    epoch: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class DraftCounter:
    """Drafts of the served epoch, and of the one before."""

    def __init__(self, scheduler: Any) -> None:
        self.served = DraftCounts()
        self.previous: DraftCounts | None = None
        wrap_instance(scheduler, "make_spec_decoding_stats", self._wrap_make_spec_decoding_stats)

    def enter(self, epoch: int) -> None:
        """Count those of another epoch from now on. What the last one accepted is logged."""
        last = self.served
        if last.draft_tokens:
            logger.info(
                "fp8ext: epoch %d accepted %d of %d drafted tokens (%.1f %%)",
                *(last.epoch, last.accepted_tokens, last.draft_tokens),
                100 * last.accepted_tokens / last.draft_tokens,
            )
        self.served, self.previous = DraftCounts(epoch), last

    def describe(self) -> dict[str, Any]:
        """Return counts of the served epoch and, once there was one, of the previous epoch."""
        return {"served": asdict(self.served), "previous": asdict(self.previous) if self.previous else None}

    def _wrap_make_spec_decoding_stats(self, original: Any) -> Any:
        def make_spec_decoding_stats(
            stats: Any,
            num_draft_tokens: int,
            num_accepted_tokens: int,
            num_invalid_spec_tokens: dict[str, int] | None,
            request_id: str,
        ) -> Any:
            proposed = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
            if proposed:
                self.served.drafts += 1
                self.served.draft_tokens += proposed
                self.served.accepted_tokens += num_accepted_tokens
            return original(
                stats,
                num_draft_tokens=num_draft_tokens,
                num_accepted_tokens=num_accepted_tokens,
                num_invalid_spec_tokens=num_invalid_spec_tokens,
                request_id=request_id,
            )

        return make_spec_decoding_stats


def attach(core: Any) -> None:
    """Let an engine core with speculative decoding count from its first request on."""
    if core.vllm_config.speculative_config is not None:
        core.fp8ext_draft_acceptance = DraftCounter(core.scheduler)
