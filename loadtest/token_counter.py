# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens that one part of a stream brought.

vLLM tells their ids (`token_ids`) where it is asked to. Of a server that tells none, each part that says anything counts as
one token, and `usage` says how many there were in all.
"""

from typing import Any

from vllm_fp8ext.loadtest.records import RequestRecord

_LABELS = frozenset({"role", "id", "type", "format", "signature"})
"""Texts of a delta that no token says."""


def count(part: dict[str, Any], at: float, request: RequestRecord) -> None:
    """Add what a part brought to a request. `at`: when the part came, in seconds of the request's clock."""
    choices = part.get("choices") or ()
    for choice in choices:
        ids = choice.get("token_ids")
        if ids:
            request.events.append((at, len(ids)))
        elif ids is None and (says(choice.get("text")) or says(choice.get("delta"))):
            request.events.append((at, 1))
            request.counted = "usage"
    usage = part.get("usage") or {}
    if request.counted == "usage" or not request.events:
        ended = all(choice.get("finish_reason") for choice in choices)
        _recount(request, int(usage.get("completion_tokens") or 0), at, ended=ended)
    request.prompt_tokens = int(usage.get("prompt_tokens") or request.prompt_tokens)


def says(value: Any) -> bool:
    """Return whether a text, or any text in a delta, is not empty: content, reasoning, a refusal, a call's name or arguments.

    Names of fields differ from server to server, so any counts but those that only label (`role`, `id`, `type`).
    """
    if isinstance(value, dict):
        return any(says(inner) for name, inner in value.items() if name not in _LABELS)
    if isinstance(value, list):
        return any(map(says, value))
    return isinstance(value, str) and bool(value)


def _recount(request: RequestRecord, total: int, at: float, *, ended: bool) -> None:
    """Count what `usage` tells beyond the events: this part brought it, or, once the answer has ended, the last event."""
    missing = total - request.tokens
    if missing <= 0:
        return
    request.counted = "usage"
    if request.events and (ended or request.events[-1][0] == at):
        before, tokens = request.events[-1]
        request.events[-1] = (before, tokens + missing)
    else:
        request.events.append((at, missing))
