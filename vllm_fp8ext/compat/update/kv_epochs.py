# SPDX-License-Identifier: Apache-2.0
"""Knows which weights computed requests' K and V, and restarts prompts at a commit.

A prompt of many steps can meet a commit. Before its first token nothing of it was sent, so its request is preempted: its
K and V are computed again, by the new weights. What keeps K and V of older weights says so with its next token (`kv_labels`).
"""

import time
from dataclasses import dataclass, field
from typing import Any

from vllm_fp8ext.compat.wrapping import wrap_instance
from vllm_fp8ext.update.contract.labels import Label

FEATURE: str = "core"
WHY: str = "Have prompts that meet a commit begin again: vLLM has all requests begin again, or none."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks(request)",)
USES: dict[str, tuple[str, ...]] = {
    "have prompts that meet a commit begin again": (
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request(request, timestamp, drop_stale_output)",
        "vllm.v1.core.sched.scheduler:Scheduler.prev_step_scheduled_req_ids",
        "vllm.v1.request:Request.num_computed_tokens",
        "vllm.v1.request:Request.num_output_tokens",
        "vllm.v1.request:Request.resumable",
        "vllm.v1.request:Request.prefill_stats",
        "vllm.v1.metrics.stats:PrefillStats.set("
        "num_prompt_tokens, num_local_cached_tokens, num_external_cached_tokens)",
    ),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/54443"
REMOVE_WHEN: str = "vLLM preempts single requests at a weight update"

RESTARTS = 2
"""How often one request's prompt begins again: updates may come faster than a long prompt is computed."""
_STATE, _RESTARTS = "fp8ext_kv", "fp8ext_restarts"
"""Attributes of a request: `_Held`, and how often it was made to begin again."""


@dataclass
class _Held:
    """K and V of one request. `labels`: of older weights that computed some of them and sampled none of its tokens then.
    `computed`, `sampled`: its tokens with K and V, and its output tokens, at the last commit, or when it began after that."""

    labels: list[Label] = field(default_factory=list)
    computed: int = 0
    sampled: int = 0


class KvEpochs:
    """The requests of one engine core."""

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        self._to_tell: dict[str, Any] = {}
        """Requests with labels of older weights that their next token is to tell, by id."""
        manager = core.scheduler.kv_cache_manager
        wrap_instance(manager, "get_computed_blocks", self._wrap_get_computed_blocks)

    def restart_prompts(self) -> tuple[int, int]:
        """Preempt each running request that has no output token, `RESTARTS` times at most. No step may be in flight.

        Requests that take their input bit by bit go on: what they have can't be computed again. Returns how many begin again,
        and the tokens of theirs whose K and V are given up.
        """
        scheduler = self._scheduler
        chosen = [
            request
            for request in scheduler.running
            if not (request.num_output_tokens or request.resumable)
            and request.num_computed_tokens
            and getattr(request, _RESTARTS, 0) < RESTARTS
        ]
        tokens = sum(request.num_computed_tokens for request in chosen)
        now = time.monotonic()
        for request in reversed(chosen):  # each goes to the head of those that wait
            scheduler.running.remove(request)
            scheduler._preempt_request(request, now, drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            setattr(request, _RESTARTS, getattr(request, _RESTARTS, 0) + 1)
            if request.prefill_stats is not None:  # what it had found in the cache is of the old weights
                request.prefill_stats.set(request.num_prompt_tokens, 0, 0)
        return len(chosen), tokens

    def end(self, label: Label) -> None:
        """Note in each request whether the weights of `label` made K and V alone.

        They compute no more, and sampled no token of it.
        """
        scheduler = self._scheduler
        self._to_tell = {name: one for name, one in self._to_tell.items() if name in scheduler.requests}
        for request in (*scheduler.running, *scheduler.kv_holding_waiting):
            held = vars(request).setdefault(_STATE, _Held())
            if request.num_computed_tokens > held.computed and request.num_output_tokens <= held.sampled:
                held.labels.append(label)
                self._to_tell[request.request_id] = request
            held.computed, held.sampled = request.num_computed_tokens, request.num_output_tokens

    def labels_to_tell(self, names: list[str]) -> dict[str, list[str]]:
        """Return encoded labels of older weights that made K and V of requests, by id; each label once."""
        return {name: self._told(name) for name in names if name in self._to_tell}

    def _wrap_get_computed_blocks(self, original: Any) -> Any:
        def get_computed_blocks(request: Any, *limit: Any) -> Any:
            """Forget what a request held, which begins now. `limit`: of the hit's length, which vLLM 0.33 passes."""
            setattr(request, _STATE, _Held(sampled=request.num_output_tokens))
            self._to_tell.pop(request.request_id, None)
            return original(request, *limit)

        return get_computed_blocks

    def _told(self, name: str) -> list[str]:
        held: _Held = getattr(self._to_tell.pop(name), _STATE)
        labels, held.labels = held.labels, []
        return [label.encode() for label in labels]
