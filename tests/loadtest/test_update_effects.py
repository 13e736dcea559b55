# SPDX-License-Identifier: Apache-2.0
"""The numbers of runs that were made up so that they are known."""

import dataclasses
import json

import pytest

from vllm_fp8ext.loadtest.records import (
    TIMEOUT,
    UNFINISHED,
    RequestRecord,
    RunRecords,
    ScrapeRecord,
    Span,
    StepRecord,
    UpdateRecord,
    plain,
    request_of,
)
from vllm_fp8ext.loadtest.run_metrics import analyse
from vllm_fp8ext.loadtest.slo import Slo
from vllm_fp8ext.loadtest.time_series import series
from vllm_fp8ext.loadtest.update_effects import effects, lies, staleness


def stream(
    start: float, stop: float, every: float = 0.1, pause: tuple[float, float] = (0.0, 0.0)
) -> RequestRecord:
    """A token every so often, but none inside the pause."""
    count = round((stop - start) / every)
    times = [start + every * (n + 1) for n in range(count)]
    events = [(at, 1) for at in times if not pause[0] < at < pause[1]]
    return RequestRecord(start, start, stop, 5, len(events), events, finish="length")


def run(
    *requests: RequestRecord,
    updates: tuple[UpdateRecord, ...] = (),
    start: float = 100.0,
    stop: float = 120.0,
) -> RunRecords:
    return RunRecords({}, start, stop, requests=list(requests), updates=list(updates))


UPDATE = UpdateRecord("late", began=108.0, commit_sent=110.0, committed=110.5, epoch=4)


def test_a_stall_is_the_longest_gap_that_overlaps_the_commit() -> None:
    quiet_before = stream(100, 120, pause=(105.0, 107.0))
    quiet_at_commit = stream(100, 120, pause=(109.95, 110.85))
    [effect] = effects(run(quiet_before, quiet_at_commit, updates=(UPDATE,)))
    assert effect["stall_seconds"] == pytest.approx(1.0)
    assert (effect["running"], effect["failed"], effect["mixed"]) == (2, 0, 0)


def test_without_running_streams_nothing_stalls() -> None:
    [effect] = effects(run(stream(100, 105), stream(112, 118), updates=(UPDATE,)))
    assert (effect["stall_seconds"], effect["running"]) == (0.0, 0)


def test_tokens_lost_until_the_rate_is_back() -> None:
    """Ten tokens per second before; none for two seconds from the begin on."""
    update = UpdateRecord("late", began=110.0, commit_sent=111.0, committed=111.2)
    [effect] = effects(run(stream(100, 120, pause=(110.01, 111.99)), updates=(update,)))
    assert effect["tokens_per_s_before"] == pytest.approx(10.0, rel=0.05)
    assert effect["tokens_lost"] == pytest.approx(20, abs=2)
    assert effect["recovery_seconds"] == pytest.approx(2.25, abs=0.3)


def test_a_rate_that_never_comes_back() -> None:
    update = UpdateRecord("late", began=110.0, commit_sent=111.0, committed=111.2)
    [effect] = effects(run(stream(100, 110), updates=(update,)))
    assert (effect["tokens_lost"], effect["recovery_seconds"]) == (None, None)


def mixed() -> RequestRecord:
    request = stream(105, 115)
    request.spans = [Span("early", 3, 0, 52), Span("late", 4, 52, len(request.events))]
    return request


def test_the_first_token_of_the_new_weights_and_mixed_answers() -> None:
    [effect] = effects(run(mixed(), updates=(UPDATE,)))
    assert effect["mixed"] == 1
    assert effect["first_new_token_seconds"] == pytest.approx(105 + 0.1 * 53 - 108.0)


def test_staleness_is_counted_from_what_the_server_tells() -> None:
    result = staleness(run(mixed(), updates=(UPDATE,)))
    assert result == {"estimated": False, "tokens": {"0": 48, "1": 52}}


def test_staleness_is_estimated_where_it_tells_nothing() -> None:
    result = staleness(run(stream(105, 115), updates=(UPDATE,)))
    assert result["estimated"]
    assert result["tokens"] == {"0": 46, "1": 54}


def test_truth_is_not_a_lie() -> None:
    assert lies(run(mixed(), updates=(UPDATE,))) == []


def test_weights_that_computed_k_and_v_alone_sampled_no_token() -> None:
    request = mixed()
    request.spans = [Span("early", 3, 0, 0), Span("late", 4, 0, 100)]
    request.sent, request.events = UPDATE.commit_sent - 1, [(UPDATE.committed + 1, 100)]
    result = run(request, updates=(UPDATE,))
    assert staleness(result) == {"estimated": False, "tokens": {"0": 100}}
    assert lies(result) == []


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([Span("late", 4, 0, 100)], "before its commit was sent"),
        ([Span("early", 3, 0, 52), Span("other", 4, 52, 100)], "a token says other"),
        ([Span("early", 3, 0, 52), Span("late", 4, 53, 100)], "do not follow each other"),
        ([Span("late", 4, 0, 52), Span("early", 3, 52, 100)], "do not follow each other"),
        ([Span("early", 3, 0, 99)], "0 to 99 for 100 tokens"),
    ],
)
def test_lies_are_found(spans: list[Span], why: str) -> None:
    request = mixed()
    request.spans = spans
    assert any(why in lie for lie in lies(run(request, updates=(UPDATE,))))


@pytest.mark.parametrize("failed", [False, True])
def test_weights_that_nobody_committed_are_a_lie(failed: bool) -> None:
    """Unless an update failed whose commit may have come all the same."""
    request = mixed()
    request.spans = [Span("early", 3, 0, 52), Span("never", 9, 52, 100)]
    updates = (UPDATE, UpdateRecord("lost", 115.0, 116.0, 117.0, error="timeout")) if failed else (UPDATE,)
    matching = [lie for lie in lies(run(request, updates=updates)) if "never committed" in lie]
    assert matching == ([] if failed else ["epoch 9, never, was never committed: the newest is 4"])


def test_old_weights_for_a_new_request_are_a_lie() -> None:
    request = stream(111, 112)
    request.spans = [Span("early", 3, 0, request.tokens)]
    assert any("when the next was served" in lie for lie in lies(run(request, updates=(UPDATE,))))


def test_latencies_start_when_a_request_was_to_be_sent() -> None:
    late = stream(101, 103)
    late.scheduled = 100.5
    measured = analyse(run(late, stop=110.0), [])
    assert measured["ttft"]["p50"] == pytest.approx(0.6, rel=0.01)
    assert measured["e2e"]["max"] == pytest.approx(2.5)
    assert measured["itl"]["p99"] == pytest.approx(0.1, rel=0.01)
    assert measured["tpot"]["mean"] == pytest.approx(0.1)
    assert measured["tokens_per_s"] == pytest.approx(2.0)
    [reason] = measured["invalid"]
    assert "schedule delay p99 500" in reason


def test_a_generator_that_was_held_up_makes_no_valid_run() -> None:
    whole = run(stream(100, 105))
    whole.lags = [0.001] * 95 + [0.02] * 5
    [reason] = analyse(whole, [])["invalid"]
    assert "held up: lag p99 20" in reason


def test_failures_are_counted_by_kind_and_unfinished_ones_apart() -> None:
    cut, broken = stream(100, 105), stream(100, 105)
    cut.error, broken.error = UNFINISHED, "http-503"
    measured = analyse(run(stream(100, 105), cut, broken), [])
    assert (measured["errors"], measured["failed_requests"]) == ({"http-503": 1}, 1)
    assert measured["unfinished_requests"] == 1
    assert measured["tokens"] == 150
    assert measured["invalid"] == []


def hanging(start: float, until: float, stop: float = 120.0) -> RequestRecord:
    """An answer of which nothing came from `until` on, that the end of the run cut off."""
    request = stream(start, until)
    request.ended, request.error, request.finish = stop, UNFINISHED, None
    return request


def test_a_server_that_hangs_keeps_no_promise() -> None:
    """Nothing fails, and whatever was answered was answered fast."""
    asked = [stream(100 + n / 10, 101 + n / 10) for n in range(80)]
    never = [RequestRecord(110 + n / 10, 110 + n / 10, 120.0, error=UNFINISHED) for n in range(90)]
    whole = run(*asked, *never, hanging(104, 109.9), updates=(UPDATE,))
    measured = analyse(whole, [])
    assert measured["stall_seconds"] == pytest.approx(120 - 109.9)
    assert measured["ttft"]["max"] == pytest.approx(10.0)
    assert measured["ttft"]["count"] > 81, "those that waited longer than any that was answered"
    assert measured["itl"]["max"] == pytest.approx(120 - 109.9)
    assert measured["e2e"]["max"] == pytest.approx(16.0)
    assert measured["failed_requests"] == 0


def test_answers_that_were_not_complete_in_time_keep_no_promise_either() -> None:
    """Else a server would be the faster the sooner one gives up."""
    asked = [stream(100 + n / 10, 101 + n / 10) for n in range(5)]
    never = [RequestRecord(101 + n / 10, 101 + n / 10, 111 + n / 10, error=TIMEOUT) for n in range(90)]
    measured = analyse(
        run(*asked, *never, hanging(104, 105)), [Slo.parse("ttft_p99<0.5"), Slo.parse("e2e_p50<5")]
    )
    assert measured["ttft"]["p99"] == pytest.approx(10.0)
    assert measured["e2e"]["p50"] == pytest.approx(10.0, rel=1e-3)
    assert measured["failed_requests"] == 90
    broken_off = stream(100, 102)
    broken_off.ended, broken_off.error = 115.0, TIMEOUT
    assert analyse(run(broken_off), [])["itl"]["max"] == pytest.approx(13.0)


def test_what_the_end_cut_off_counts_as_far_as_it_came() -> None:
    cut = hanging(118, 120)
    measured = analyse(run(stream(100, 105), cut), [])
    assert measured["ttft"]["count"] == 2
    assert measured["itl"]["count"] == 49 + 19
    assert measured["e2e"]["count"] == 1


def test_what_comes_after_the_end_of_a_run_is_not_there() -> None:
    """Other processes end a little later."""
    late = stream(115, 125)
    measured = analyse(run(stream(100, 105), late), [])
    assert (measured["unfinished_requests"], measured["requests_per_s"]) == (1, 1 / 20)
    assert measured["tokens"] == 50 + 50


def test_an_update_that_failed_brings_no_new_token() -> None:
    update = UpdateRecord("late", 108.0, 110.0, 110.5, error="canary-refused")
    [effect] = effects(run(stream(100, 120), updates=(update,)))
    assert effect["first_new_token_seconds"] is None


@pytest.mark.parametrize(("ends", "share"), [((101, 102), 0.5), ((101, 102, 109, 110), 0.8), ((102,), 0.0)])
def test_stragglers_are_waited_for_from_the_end_of_the_fast_half_on(
    ends: tuple[int, ...], share: float
) -> None:
    requests = [stream(100, end) for end in ends]
    for request in requests:
        request.step = 1
    whole = run(*requests)
    whole.steps = [StepRecord(1, 100.0, float(max(ends)))]
    assert analyse(whole, [])["steps"]["straggler_share"] == pytest.approx(share)


def test_goodput_counts_answers_that_keep_every_slo_of_their_own() -> None:
    slos = [Slo.parse("ttft_p99<0.15"), Slo.parse("itl_p99<0.5"), Slo.parse("tokens_per_s>1e9")]
    slow = stream(100, 110, every=1.0)
    measured = analyse(run(stream(100, 105), stream(100, 105), slow), slos)
    assert measured["goodput_per_s"] == pytest.approx(2 / 20)


def test_rollout_steps_and_their_stragglers() -> None:
    fast, slow = stream(100, 102), stream(100, 110)
    fast.step = slow.step = 1
    other = stream(100, 102)
    other.step = 1
    whole = run(fast, other, slow)
    whole.steps = [StepRecord(1, 100.0, 110.0)]
    measured = analyse(whole, [])
    assert measured["steps"]["max"] == 10.0
    assert measured["steps"]["straggler_share"] == pytest.approx(0.8)


def test_nothing_asked_is_no_valid_run() -> None:
    assert analyse(run(), [])["invalid"] == ["nothing was asked"]


@pytest.mark.parametrize("error", ["http-400", UNFINISHED])
def test_a_run_without_a_single_success_is_not_valid(error: str) -> None:
    lost = stream(100, 105)
    lost.error = error
    [reason] = analyse(run(lost), [])["invalid"]
    assert reason.startswith("no request succeeded: ")


def refused(said: str, error: str = "http-400") -> RequestRecord:
    return RequestRecord(100.0, 100.0, 101.0, error=error, said=said)


def test_the_most_frequent_error_is_told_in_its_own_words() -> None:
    failed = [refused("too long"), refused("out of vocabulary"), refused("too long"), refused("", "connect")]
    whole = run(
        stream(100, 105), *failed, updates=(dataclasses.replace(UPDATE, error="internal", said="why"),)
    )
    measured = analyse(whole, [])
    error = {"kind": "http-400", "status": 400, "count": 3, "text": "too long"}
    assert measured["most_frequent_error"] == error
    assert measured["remarks"] == [
        "3 of 5 requests failed with http-400: too long",
        "1 of 1 updates failed with internal: why",
    ]
    assert analyse(run(stream(100, 105)), [])["most_frequent_error"] is None


def test_series_over_time() -> None:
    whole = run(stream(100, 110), updates=(UPDATE,))
    whole.scrapes = [ScrapeRecord(101.0, {"running": 3.0})]
    result = series(whole)
    assert result["at"][:3] == [0.0, 1.0, 2.0]
    assert sum(result["tokens_per_s"]) == pytest.approx(100)
    assert result["updates"] == [{"began": 8.0, "committed": 10.5, "version": "late"}]
    assert result["scrapes"] == [{"at": 1.0, "running": 3.0}]


def test_requests_survive_json() -> None:
    assert request_of(json.loads(json.dumps(plain(mixed())))) == mixed()


def test_what_another_process_is_told_is_not_copied() -> None:
    """Copies of all events, made every three seconds, would hold the streams up that still go on."""
    request = mixed()
    assert plain(request)["events"] is request.events
    assert set(plain(request)) == {field.name for field in dataclasses.fields(RequestRecord)}
