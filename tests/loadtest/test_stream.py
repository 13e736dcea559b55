# SPDX-License-Identifier: Apache-2.0
"""One streamed answer: what is counted, and by which name each failure goes. Against a real server, which misbehaves."""

import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_fp8ext.loadtest import stream
from vllm_fp8ext.loadtest.latency import ttft
from vllm_fp8ext.loadtest.prompts import Prompt
from vllm_fp8ext.loadtest.records import RequestRecord, Span
from vllm_fp8ext.loadtest.stream import RequestSender, Target

PROMPT = Prompt((11, 12, 13), 4)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    line = [sys.executable, str(Path(__file__).with_name("flaky_server.py"))]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


def ask(url: str, model: str, **more: object) -> RequestRecord:
    asker = RequestSender(Target(url=url, model=model, **more))  # type: ignore[arg-type]  # what tests choose
    collected: list[RequestRecord] = []
    asker.ask(PROMPT, asker.body(PROMPT), collected.append, scheduled=1.0, step=2)
    asker.close()
    [request] = collected
    assert (request.scheduled, request.step, request.max_tokens) == (1.0, 2, 4)
    assert request.ended >= request.sent > 1.0
    return request


def test_tokens_are_counted_by_their_ids(url: str) -> None:
    request = ask(url, "good")
    assert (request.error, request.finish, request.counted) == (None, "length", "ids")
    assert (request.tokens, [count for _, count in request.events]) == (4, [2, 2])
    assert request.spans == [Span("a", 3, 0, 3), Span("b", 4, 3, 4)]
    assert request.prompt_tokens == 3


@pytest.mark.parametrize(
    ("endpoint", "logprobs", "expected"),
    [
        ("completions", 0, {"logprobs": 0}),
        ("completions", None, {}),
        ("chat", 2, {"logprobs": True, "top_logprobs": 2}),
        ("chat", None, {}),
    ],
)
def test_requests_ask_for_logprobs_as_trainers_do(
    endpoint: str, logprobs: int | None, expected: dict[str, object]
) -> None:
    assert Target(url="http://there", model="m").logprobs == 0
    asker = RequestSender(Target(url="http://there", model="m", endpoint=endpoint, logprobs=logprobs))
    body = json.loads(asker.body(PROMPT))
    asker.close()
    assert {name: value for name, value in body.items() if "logprobs" in name} == expected
    assert (body["temperature"], body["return_token_ids"], body["stream"]) == (1.0, True, True)


@pytest.mark.parametrize(
    ("part", "events"),
    [
        ({"choices": [{"token_ids": [1, 2], "text": "x", "logprobs": {"tokens": ["x"]}}]}, [2]),
        ({"choices": [{"token_ids": [1]}, {"token_ids": [2, 3]}], "usage": None}, [1, 2]),
        ({"choices": [{"token_ids": [1]}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}, [1]),
        ({"choices": [{"text": "x"}]}, [1]),
        ({"choices": [{"token_ids": [1], "finish_reason": "length"}]}, [1]),
    ],
)
def test_a_part_counts_alike_whether_it_is_read_whole_or_not(
    part: dict[str, object], events: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken() -> RequestRecord:
        request = RequestRecord(scheduled=0.0, sent=0.0, prompt_tokens=3, max_tokens=4, step=None)
        stream._take(json.dumps(part).encode(), request)
        return dataclasses.replace(request, events=[count for _, count in request.events])

    quick = taken()
    monkeypatch.setattr(stream, "_count_ids", lambda *_: False)
    assert quick == taken()
    assert quick.events == events


def test_without_ids_they_are_counted_by_usage(url: str) -> None:
    request = ask(url, "usage")
    assert (request.error, request.tokens, request.counted, request.prompt_tokens) == (None, 7, "usage", 9)


CALL = {"index": 0, "id": "call-1", "type": "function"}


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning": "x"},
        {"reasoning_content": "x", "content": None},
        {"reasoning": None, "reasoning_content": "x"},
        {"content": "", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"tool_calls": [{**CALL, "custom": {"input": "x"}}]},
        {"function_call": {"arguments": "{"}},
        {"refusal": "x"},
        {"audio": {"id": "a", "transcript": "x"}},
        {"audio": {"id": "a", "data": "UklG"}},
        {"reasoning_details": [{"type": "reasoning.text", "text": "x"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "x"}]}]},
    ],
    ids=str,
)
def test_whatever_a_part_says_is_a_token_that_came(url: str, delta: dict[str, object]) -> None:
    request = ask(url, f"delta {json.dumps(delta)}", endpoint="chat")
    assert (request.error, request.finish, request.counted) == (None, "stop", "usage")
    assert [count for _, count in request.events] == [1, 1, 1, 1, 3]
    assert ttft(request) == request.events[0][0] - request.scheduled


@pytest.mark.parametrize(
    "delta",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": "", "reasoning": None, "tool_calls": []},
        {"tool_calls": [{**CALL, "function": {"name": None, "arguments": ""}}]},
        {"audio": {"id": "a", "expires_at": 1}},
    ],
    ids=str,
)
def test_what_says_nothing_is_no_token(url: str, delta: dict[str, object]) -> None:
    request = ask(url, f"delta {json.dumps(delta)}", endpoint="chat")
    assert (request.error, request.counted) == (None, "usage")
    assert [count for _, count in request.events] == [1, 6]


def test_tokens_that_no_part_shows_came_with_the_end(url: str) -> None:
    request = ask(url, "silent", endpoint="chat")
    assert (request.error, request.counted) == (None, "usage")
    assert [count for _, count in request.events] == [7]


def test_usage_that_each_part_tells_counts_its_tokens(url: str) -> None:
    request = ask(url, "continuous usage")
    assert (request.error, request.counted) == (None, "usage")
    assert [count for _, count in request.events] == [1, 1, 3]


@pytest.mark.parametrize(
    ("model", "kind", "tokens"),
    [
        ("http-500", "http-500", 0),
        ("http-503", "http-503", 0),
        ("http-404", "http-404", 0),
        ("garbage", "broken", 0),
        ("other events", "broken", 2),
        ("not http", "broken", 0),
        ("reset", "truncated", 2),
        ("truncated", "truncated", 2),
        ("no finish", "truncated", 2),
        ("error event", "server-error", 2),
        ("abort", "aborted", 2),
    ],
)
def test_failures_have_names(url: str, model: str, kind: str, tokens: int) -> None:
    request = ask(url, model)
    assert (request.error, request.tokens) == (kind, tokens)


@pytest.mark.parametrize(
    ("model", "kind", "said"),
    [
        ("refusal", "http-400", "Token id 742 is out of vocabulary"),
        ("plain refusal", "http-503", "busy" + 195 * "!" + "…"),
        ("http-500", "http-500", None),
        ("half a refusal", "http-502", None),
        ("error event", "server-error", "no"),
        ("garbage", "broken", "expected JSON in an event, found b'{nonsense'"),
    ],
)
def test_what_the_server_says_of_a_failure_is_kept(url: str, model: str, kind: str, said: str | None) -> None:
    request = ask(url, model)
    assert (request.error, request.said) == (kind, said)


def test_a_server_that_does_not_answer_in_time(url: str) -> None:
    request = ask(url, "hang", timeout=0.3)
    assert request.error == "timeout"
    assert request.ended - request.sent < 5


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert ask(f"http://127.0.0.1:{free.getsockname()[1]}", "x").error == "connect"


def test_a_server_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        request = ask(f"http://127.0.0.1:{silent.getsockname()[1]}", "x", timeout=0.3)
    assert request.error == "timeout"
