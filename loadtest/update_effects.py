# SPDX-License-Identifier: Apache-2.0
"""Effects of each change of weights on the requests that ran."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from vllm_fp8ext.loadtest.latency import summary, ttft
from vllm_fp8ext.loadtest.records import UNFINISHED, RequestRecord, RunRecords, Span, UpdateRecord

BIN = 0.25
"""Seconds over which a token rate is taken."""
BEFORE = 5.0
"""Seconds before an update whose token rate is the one to recover; less if the update before is nearer."""
RECOVERED = 0.95
AROUND = 5.0
"""Seconds after a commit in which first tokens count as being around it."""


def effects(run: RunRecords) -> list[dict[str, Any]]:
    """For each update, in order: `stall_seconds`, `tokens_lost`, `recovery_seconds`, and how requests fared."""
    arrivals = sorted((at, count) for request in run.requests for at, count in request.events)
    rows = []
    for number, update in enumerate(run.updates):
        earlier = run.updates[number - 1].committed if number else run.start
        later = run.updates[number + 1].began if number + 1 < len(run.updates) else run.stop
        running = [r for r in run.requests if r.sent <= update.committed and r.ended >= update.commit_sent]
        near = [r for r in run.requests if update.began <= r.scheduled <= update.committed + AROUND]
        rows.append(
            {
                **asdict(update),
                "push_seconds": update.committed - update.began,
                "stall_seconds": stall(running, update),
                **recovery(arrivals, update, earlier, later),
                "running": len(running),
                "aborted": sum(r.error == "aborted" for r in running),
                "failed": sum(r.error not in (None, "aborted", UNFINISHED) for r in running),
                "mixed": sum(len(r.spans) > 1 for r in running),
                "ttft_around": summary(seconds for r in near if (seconds := ttft(r)) is not None),
                "first_new_token_seconds": _first_new_token(run.requests, update),
            }
        )
    return rows


def stall(requests: list[RequestRecord], update: UpdateRecord) -> float:
    """Longest time between two tokens of one stream that overlaps the commit; or since its last one, where it broke off."""
    longest = 0.0
    for request in requests:
        times = [at for at, _ in request.events]
        if request.error is not None:
            times.append(request.ended)
        here = bisect_right(times, update.commit_sent)
        while 0 < here < len(times) and times[here - 1] <= update.committed:
            longest = max(longest, times[here] - times[here - 1])
            here += 1
    return longest


def recovery(
    arrivals: list[tuple[float, int]], update: UpdateRecord, earlier: float, later: float
) -> dict[str, float | None]:
    """Return the tokens that an update cost, against the rate before it. They are counted from its begin until the rate was
    back at 95 %; None when it did not come back before the next update."""
    since = max(earlier, update.began - BEFORE)
    if update.began - since < BIN:
        return {"tokens_per_s_before": None, "tokens_lost": None, "recovery_seconds": None}
    rate = sum(count for at, count in arrivals if since <= at < update.began) / (update.began - since)
    lost, at = 0.0, update.began
    while at + BIN <= later:
        came = _between(arrivals, at, at + BIN)
        at += BIN
        if at > update.committed and came >= RECOVERED * rate * BIN:
            seconds = at - update.began
            return {"tokens_per_s_before": rate, "tokens_lost": max(0.0, lost), "recovery_seconds": seconds}
        lost += rate * BIN - came
    return {"tokens_per_s_before": rate, "tokens_lost": None, "recovery_seconds": None}


def _between(arrivals: list[tuple[float, int]], start: float, stop: float) -> int:
    first = bisect_right(arrivals, (start, -1))
    last = bisect_right(arrivals, (stop, -1))
    return sum(count for _, count in arrivals[first:last])


def _first_new_token(requests: list[RequestRecord], update: UpdateRecord) -> float | None:
    """From the begin of the push to the first token that the new weights sampled; None where they were not served."""
    if update.error is not None:
        return None
    if update.epoch is None:
        times = [at for request in requests for at, _ in request.events if at > update.committed]
    else:
        times = [
            arrival(request, span.start)
            for request in requests
            for span in request.spans
            if span.epoch == update.epoch
        ]
    return min(times) - update.began if times else None


def arrival(request: RequestRecord, token: int) -> float:
    """When token number `token` of an answer came."""
    came = 0
    for at, count in request.events:
        came += count
        if came > token:
            return at
    return request.ended


def staleness(run: RunRecords) -> dict[str, Any]:
    """Count tokens by how many epochs their weights were behind. Those served when their answer was complete are compared.

    From `weight_versions`; for servers without, estimated by the updates between a token's arrival and its answer's end.
    """
    spans_known = any(request.spans for request in run.requests)
    commits = [update for update in run.updates if update.error is None]
    tokens: Counter[int] = Counter()
    for request in run.requests:
        if request.error is not None:
            continue
        if spans_known:
            newest = max((span.epoch for span in request.spans), default=0)
            for span in request.spans:
                tokens[newest - span.epoch] += span.end - span.start
        else:
            for at, count in request.events:
                tokens[sum(at < update.committed <= request.ended for update in commits)] += count
    counted = {str(behind): tokens[behind] for behind in sorted(tokens) if tokens[behind]}
    return {"estimated": not spans_known, "tokens": counted}


def lies(run: RunRecords) -> list[str]:
    """Tokens that claim weights which were not live: sampled before their commit was sent, or in a request that was sent
    after the next one was answered; of an epoch that nobody committed; spans with gaps, or of epochs that go back."""
    commits = {update.epoch: update for update in run.updates if update.epoch is not None}
    newest = max(commits, default=0)
    # one that failed may be served
    certain = commits and all(update.epoch is not None for update in run.updates)
    problems = []
    for request in run.requests:
        for span in request.spans:
            mine, after = commits.get(span.epoch), commits.get(span.epoch + 1)
            if certain and span.epoch > newest:
                problems.append(
                    f"epoch {span.epoch}, {span.version}, was never committed: the newest is {newest}"
                )
            if mine and arrival(request, span.start) < mine.commit_sent:
                problems.append(f"epoch {span.epoch} sampled a token before its commit was sent")
            if after and after.committed < request.sent:
                problems.append(
                    f"epoch {span.epoch} sampled for a request that was sent when the next was served"
                )
            if mine and span.version != mine.version:
                problems.append(f"epoch {span.epoch} is {mine.version}, a token says {span.version}")
        problems += list(_broken(request))
    return problems


def _broken(request: RequestRecord) -> Iterator[str]:
    ends: list[Span] = request.spans
    if not ends:
        return
    if ends[0].start != 0 or (request.error is None and ends[-1].end != request.tokens):
        yield f"spans {ends[0].start} to {ends[-1].end} for {request.tokens} tokens"
    for before, after in pairwise(ends):
        if before.end != after.start or before.epoch >= after.epoch:
            yield f"spans {before} and {after} do not follow each other"
