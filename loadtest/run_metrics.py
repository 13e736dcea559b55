# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run: what tables show, SLOs are checked against, and JSON holds."""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm_fp8ext.loadtest.error_summary import most_frequent, remarks
from vllm_fp8ext.loadtest.latency import end_to_end, gaps, summary, tpot, ttft
from vllm_fp8ext.loadtest.records import TIMEOUT, UNFINISHED, RequestRecord, RunRecords
from vllm_fp8ext.loadtest.slo import Slo
from vllm_fp8ext.loadtest.update_effects import effects, lies, staleness

LATEST_DELAY = 0.010
"""Seconds that a generator may be late in a valid run. It is the 99th percentile, of sending and of waking up."""


def analyse(run: RunRecords, slos: list[Slo]) -> dict[str, Any]:
    """Everything about a run, flat where an SLO can name it. What comes after its end doesn't count: of several processes
    some end a little later.

    Answers that the end of the run, or of their time, cut off count as far as they came. What they were waiting for then
    counts as if it had come at that time, where that is later than everything that came: else a server that hangs would seem
    fast.
    """
    requests = [_until(request, run.stop) for request in run.requests if request.sent <= run.stop]
    run = dataclasses.replace(run, requests=requests)
    seconds = max(run.stop - run.start, 1e-9)
    tokens = sum(request.tokens for request in run.requests)
    cut = [request for request in run.requests if request.error in (UNFINISHED, TIMEOUT)]
    good = [request for request in run.requests if request.error is None]
    failed = [request for request in run.requests if request.error not in (None, UNFINISHED)]
    delays = summary(request.sent - request.scheduled for request in run.requests)
    measured: dict[str, Any] = {
        "seconds": seconds,
        "requests": len(run.requests),
        "errors": dict(Counter(request.error for request in failed)),
        "most_frequent_error": most_frequent(failed),
        "failed_requests": len(failed),
        "unfinished_requests": len(run.requests) - len(good) - len(failed),
        "requests_per_s": len(good) / seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "input_tokens_per_s": sum(request.prompt_tokens for request in good) / seconds,
        "ttft": summary(
            _at_least(map(ttft, good + cut), (r.ended - r.scheduled for r in cut if not r.events))
        ),
        "itl": summary(
            _at_least(
                (gap for request in good + cut for gap in gaps(request)),
                (r.ended - r.events[-1][0] for r in cut if r.events),
            )
        ),
        "tpot": summary(value for request in good if (value := tpot(request)) is not None),
        "e2e": summary(_at_least(map(end_to_end, good), (r.ended - r.scheduled for r in cut))),
        "schedule_delay": delays,
        "generator_lag": summary(run.lags),
        "achieved_rate": len(run.requests) / seconds,
        "counted": dict(Counter(request.counted for request in good)),
        "steps": _steps(run),
        "updates": effects(run),
        "staleness": staleness(run),
        "lies": lies(run),
    }
    updates = measured["updates"]
    measured["stall_seconds"] = max((update["stall_seconds"] for update in updates), default=0.0)
    measured["failed_updates"] = sum(update["error"] not in (None, UNFINISHED) for update in updates)
    measured["goodput_per_s"] = sum(_meets(request, slos) for request in good) / seconds
    measured["remarks"] = remarks(run, measured)
    measured["invalid"] = _invalid(run, measured)
    return measured


def _until(request: RequestRecord, stop: float) -> RequestRecord:
    """The request as it was when the run ended."""
    if request.ended <= stop:
        return request
    events = [(at, count) for at, count in request.events if at <= stop]
    return dataclasses.replace(request, events=events, ended=stop, error=UNFINISHED, said=None)


def _at_least(measured: Iterable[float | None], bounds: Iterable[float]) -> list[float]:
    """Return what was measured, and lower bounds of what lies above all that."""
    values = [value for value in measured if value is not None]
    most = max(values, default=0.0)
    return values + [bound for bound in bounds if bound > most]


def _invalid(run: RunRecords, measured: dict[str, Any]) -> list[str]:
    """Why the numbers can't be trusted."""
    reasons = []
    for what, name in (
        ("sent late: schedule delay", "schedule_delay"),
        ("was held up: lag", "generator_lag"),
    ):
        late = measured[name].get("p99", 0.0)
        if late > LATEST_DELAY:
            reasons.append(f"the generator {what} p99 {late * 1e3:.1f} ms, {LATEST_DELAY * 1e3:g} ms at most")
    if measured["lies"]:
        reasons.append(f"{len(measured['lies'])} tokens claim weights that were not live")
    if not run.requests:
        reasons.append("nothing was asked")
    elif all(request.error is not None for request in run.requests):
        failed, unfinished = measured["failed_requests"], measured["unfinished_requests"]
        reasons.append(f"no request succeeded: {failed} failed, {unfinished} unfinished")
    return reasons


def _meets(request: RequestRecord, slos: list[Slo]) -> bool:
    """Return whether one request keeps every SLO about single requests."""
    values = {"ttft": ttft(request), "tpot": tpot(request), "e2e": end_to_end(request)}
    values["itl"] = max(gaps(request), default=None)
    for slo in slos:
        value = values.get(slo.name.partition("_")[0])
        if value is not None and not slo.holds(value):
            return False
    return True


def _steps(run: RunRecords) -> dict[str, Any]:
    """Return durations of rollout steps, and the share that only the slowest half took."""
    if not run.steps:
        return {}
    tails = []
    for step in run.steps:
        ends = sorted(request.ended for request in run.requests if request.step == step.number)
        if ends and step.ended > step.began:
            tails.append((step.ended - ends[(len(ends) - 1) // 2]) / (step.ended - step.began))
    return {
        **summary(step.ended - step.began for step in run.steps),
        "straggler_share": sum(tails) / len(tails) if tails else 0.0,
    }
