# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run: what tables show, SLOs are checked against, and JSON holds."""

import dataclasses
from collections import Counter
from typing import Any

from vllm_fp8ext.loadtest.effects import effects, lies, staleness
from vllm_fp8ext.loadtest.latency import end_to_end, gaps, summary, tpot, ttft
from vllm_fp8ext.loadtest.records import UNFINISHED, Request, Run
from vllm_fp8ext.loadtest.remarks import most_frequent, remarks
from vllm_fp8ext.loadtest.slo import Slo

LATEST_DELAY = 0.010
"""Seconds that a generator may send or wake up late (99th percentile) for its run to be valid."""


def analyse(run: Run, slos: list[Slo]) -> dict[str, Any]:
    """Everything about a run, flat where an SLO can name it. Requests sent after its end don't count: of several processes
    some end a little later."""
    run = dataclasses.replace(run, requests=[r for r in run.requests if r.sent <= run.stop])
    seconds = max(run.stop - run.start, 1e-9)
    tokens = sum(count for r in run.requests for at, count in r.events if at <= run.stop)
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
        "ttft": summary(value for request in good if (value := ttft(request)) is not None),
        "itl": summary(gap for request in good for gap in gaps(request)),
        "tpot": summary(value for request in good if (value := tpot(request)) is not None),
        "e2e": summary(value for request in good if (value := end_to_end(request)) is not None),
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


def _invalid(run: Run, measured: dict[str, Any]) -> list[str]:
    """Why the numbers can't be trusted."""
    found = []
    for what, name in (
        ("sent late: schedule delay", "schedule_delay"),
        ("was held up: lag", "generator_lag"),
    ):
        late = measured[name].get("p99", 0.0)
        if late > LATEST_DELAY:
            found.append(f"the generator {what} p99 {late * 1e3:.1f} ms, {LATEST_DELAY * 1e3:g} ms at most")
    if measured["lies"]:
        found.append(f"{len(measured['lies'])} tokens claim weights that were not live")
    if not run.requests:
        found.append("nothing was asked")
    elif all(request.error is not None for request in run.requests):
        failed, unfinished = measured["failed_requests"], measured["unfinished_requests"]
        found.append(f"no request succeeded: {failed} failed, {unfinished} unfinished")
    return found


def _meets(request: Request, slos: list[Slo]) -> bool:
    """Whether one request keeps every SLO about single requests."""
    values = {"ttft": ttft(request), "tpot": tpot(request), "e2e": end_to_end(request)}
    values["itl"] = max(gaps(request), default=None)
    for slo in slos:
        value = values.get(slo.name.partition("_")[0])
        if value is not None and not slo.holds(value):
            return False
    return True


def _steps(run: Run) -> dict[str, Any]:
    """Duration of rollout steps, and the part of each that only its slowest half was waited for."""
    if not run.steps:
        return {}
    tails = []
    for step in run.steps:
        ends = sorted(request.ended for request in run.requests if request.step == step.number)
        if ends and step.ended > step.began:
            tails.append((step.ended - ends[len(ends) // 2]) / (step.ended - step.began))
    return {
        **summary(step.ended - step.began for step in run.steps),
        "straggler_share": sum(tails) / len(tails) if tails else 0.0,
    }
