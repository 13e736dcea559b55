# SPDX-License-Identifier: Apache-2.0
"""Answers beside those of stock vLLM, with BF16 weights and without this plugin: the same fields in all of them, the same
words where no number decides them, the same refusals, the same routes."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.demo.server import MODEL, Server

from .conftest import OPTIONS, answering, on_early

PROMPT = "12+34="
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
SAMPLED = {"model": MODEL, "temperature": 1, "seed": 1, "max_tokens": 4, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "add"}}
USAGE = {"include_usage": True}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": PROMPT},
    "several prompts": {"prompt": [PROMPT, "1+1="]},
    "token ids": {"prompt": PROMPT, "return_token_ids": True},
    "logprobs": {"prompt": PROMPT, "logprobs": 2},
    "prompt logprobs": {"prompt": PROMPT, "prompt_logprobs": 1},
    "echo": {"prompt": PROMPT, "echo": True},
    "echo of token ids": {"prompt": [5, 6, 7], "echo": True},
    "echo of several": {"prompt": [PROMPT, "1+1="], "echo": True},
    "echo with token ids": {"prompt": PROMPT, "echo": True, "return_token_ids": True},
    "echo with logprobs": {"prompt": PROMPT, "echo": True, "logprobs": 1},
    "echo alone": {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1},
    "echo of n": {**SAMPLED, "prompt": PROMPT, "echo": True, "n": 2},
    "n": {**SAMPLED, "prompt": PROMPT, "n": 3},
    "a stop string": {"prompt": PROMPT, "stop": ["="], "max_tokens": 40},
    "a stop string that is kept": {
        "prompt": PROMPT,
        "stop": ["="],
        "max_tokens": 40,
        "include_stop_str_in_output": True,
    },
    "stop tokens": {"prompt": PROMPT, "stop_token_ids": list(range(1, 20)), "ignore_eos": False},
    "beams": {"model": MODEL, "prompt": PROMPT, "n": 2, "use_beam_search": True},
    "a stream": {"prompt": PROMPT, "stream": True},
    "a stream of several": {"prompt": PROMPT, "n": 2, "stream": True, **SAMPLED},
    "a stream with usage": {"prompt": PROMPT, "stream": True, "stream_options": USAGE},
    "a stream with usage in each part": {
        "prompt": PROMPT,
        "stream": True,
        "stream_options": {**USAGE, "continuous_usage_stats": True},
    },
    "a stream with token ids": {"prompt": PROMPT, "stream": True, "return_token_ids": True},
    "a stream with echo": {"prompt": PROMPT, "stream": True, "echo": True},
    "a stream with echo and token ids": {
        "prompt": PROMPT,
        "stream": True,
        "echo": True,
        "return_token_ids": True,
    },
    "a choice": {"prompt": PROMPT, "structured_outputs": {"choice": ["12", "12"]}, "max_tokens": 2},
    "a schema without its characters": {"prompt": PROMPT, "structured_outputs": {"json": SCHEMA}},
    "a stream of a schema without its characters": {
        "prompt": PROMPT,
        "structured_outputs": {"json": SCHEMA},
        "stream": True,
    },
    "a broken expression": {"prompt": PROMPT, "structured_outputs": {"regex": "("}},
    "another model": {"prompt": PROMPT, "model": "other"},
    "no prompt": {"prompt": ""},
    "a prompt of another type": {"prompt": {"a": 1}},
    "a prompt that is too long": {"prompt": [5] * 3000},
    "a token that is none": {"prompt": [99_999]},
    "a stream of a token that is none": {"prompt": [99_999], "stream": True},
    "a negative length": {"prompt": PROMPT, "max_tokens": -1},
    "a negative temperature": {"prompt": PROMPT, "temperature": -1},
    "too many logprobs": {"prompt": PROMPT, "logprobs": 999},
    "several greedy ones": {"prompt": PROMPT, "n": 2},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {**SAMPLED, "n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "token ids": {"return_token_ids": True},
    "echo": {"echo": True},
    "a stop string": {"stop": "=", "max_tokens": 40},
    "a stream": {"stream": True},
    "a stream with usage": {"stream": True, "stream_options": USAGE},
    "a stream with token ids": {"stream": True, "return_token_ids": True},
    "a schema without its characters": {"response_format": FORMAT},
    "a stream of a schema without its characters": {"response_format": FORMAT, "stream": True},
    "a broken schema": {
        "response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"type": "nope"}}}
    },
    "a tool": {"tools": [TOOL]},
    "a named tool": {"tools": [TOOL], "tool_choice": NAMED},
    "no message": {"messages": []},
}
OTHERS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "responses": ("POST", "/v1/responses", {"model": MODEL, "input": PROMPT, "max_output_tokens": 4}),
    "messages": (
        "POST",
        "/v1/messages",
        {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4},
    ),
    "batch": (
        "POST",
        "/v1/chat/completions/batch",
        {**GREEDY, "messages": [[{"role": "user", "content": PROMPT}]] * 2},
    ),
    "generate": ("POST", "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 4}}),
    "tokenize": ("POST", "/tokenize", {"model": MODEL, "prompt": PROMPT}),
    "detokenize": ("POST", "/detokenize", {"model": MODEL, "tokens": [5, 6]}),
    "models": ("GET", "/v1/models", None),
    "version": ("GET", "/version", None),
    "health": ("GET", "/health", None),
    "ping": ("GET", "/ping", None),
    "scaling": ("POST", "/is_scaling_elastic_ep", None),
    "another route": ("GET", "/other", None),
    "another method": ("GET", "/v1/completions", None),
}
CASES = {
    **{
        f"completions: {name}": ("POST", "/v1/completions", GREEDY | body)
        for name, body in COMPLETIONS.items()
    },
    **{
        f"chat: {name}": (
            "POST",
            "/v1/chat/completions",
            GREEDY | {"messages": [{"role": "user", "content": PROMPT}]} | body,
        )
        for name, body in CHATS.items()
    },
    **OTHERS,
}

Answer = tuple[int, Any]
"""A status, and the JSON of a whole answer, or of each part of a stream."""
OURS = "weight_versions"
"""The one field that answers have here alone."""
BY_TOKEN = {"top_logprobs", "prompt_logprobs"}
"""Fields whose keys may be tokens, which numbers decide."""
WORDS = {"object", "finish_reason", "role", "type", "code", "param"}
"""Fields whose values are the same; `message`, too, but for what is made of random ids."""


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's own server on the early checkpoint in BF16."""
    server = Server(EARLY, tmp_path_factory.mktemp("stock") / "stock.log", arguments=OPTIONS, stock=True)
    with answering(server):
        yield server


def form(value: Any, field: str = "") -> Any:
    """What an answer is made of: its fields, the types of what numbers decide, and the values of what they don't."""
    if isinstance(value, dict):
        if field in BY_TOKEN:
            return [form(next(iter(value.values())))]
        return {name: form(inner, name) for name, inner in value.items() if name != OURS}
    if isinstance(value, list):
        return [form(inner, field) for inner in value]
    return value if field in WORDS or isinstance(value, bool) else type(value).__name__


def parts_form(value: Any, path: str = "", field: str = "") -> Iterator[tuple[str, Any]]:
    """Paths of a stream's fields, and what stands there in any of its parts: how many tokens one has is a matter of time."""
    if isinstance(value, list):
        for inner in value:
            yield from parts_form(inner, path, field)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name != OURS:
                yield from parts_form(inner, f"{path}.{name}", name)
    else:
        yield path, "anything"
        if value is not None:
            yield path, form(value, field)


def ask(server: Server, method: str, path: str, body: dict[str, Any] | None) -> Answer:
    """What a server answers."""
    answer = httpx.request(method, server.url + path, json=body, timeout=120)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        lines = [
            line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")
        ]
        assert lines[-1] == "[DONE]"
        return answer.status_code, [json.loads(line) for line in lines[:-1]]
    return answer.status_code, answer.json() if answer.content else None


@pytest.fixture(scope="module")
def answers(servers: dict[str, Server], stock: Server) -> dict[str, tuple[Answer, Answer]]:
    """What became of each case: here, and at stock vLLM. All are asked at once."""
    ours = on_early(servers["tp1"])
    with ThreadPoolExecutor(16) as pool:
        asked = {case: [pool.submit(ask, server, *CASES[case]) for server in (ours, stock)] for case in CASES}
    return {case: (here.result(), there.result()) for case, (here, there) in asked.items()}


@pytest.mark.parametrize("case", CASES)
def test_answers_have_the_form_of_stock_vllms(answers: dict[str, tuple[Answer, Answer]], case: str) -> None:
    (status, ours), (expected, theirs) = answers[case]
    assert status == expected
    if isinstance(ours, list):  # a stream
        assert set(parts_form(ours)) == set(parts_form(theirs))
    else:
        assert form(ours) == form(theirs)
    if status >= 400:
        assert ours == theirs


@pytest.mark.parametrize("case", [name for name in CASES if "completions" in name and "echo" in name])
def test_an_echo_has_the_prompt_where_stock_vllms_has(
    answers: dict[str, tuple[Answer, Answer]], case: str
) -> None:
    """Where token ids are asked for, vLLM tells the prompt by them alone."""

    def echoed(result: Any) -> list[tuple[bool, Any]]:
        choices = (result if isinstance(result, list) else [result])[0]["choices"]
        return [
            (choice["text"].startswith(("12+34=", "1+1=", "234")), choice["prompt_token_ids"])
            for choice in choices
        ]

    (_, ours), (_, theirs) = answers[case]
    assert echoed(ours) == echoed(theirs)
    assert all(text or ids for text, ids in echoed(ours))


def test_a_grammar_that_no_token_fits_is_told_in_the_log(
    servers: dict[str, Server], answers: dict[str, tuple[Answer, Answer]]
) -> None:
    (status, answer), _ = answers["chat: a schema without its characters"]
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
    assert "grammar rejected tokens" in servers["tp1"].log.read_text()


def test_routes_are_stock_vllms(single: Server, stock: Server) -> None:
    def routes(server: Server) -> set[tuple[str, str]]:
        paths = httpx.get(f"{server.url}/openapi.json", timeout=60).json()["paths"]
        return {(method, path) for path, methods in paths.items() for method in methods}

    ours = {route for route in routes(single) if not route[1].startswith("/fp8ext/v1/")}
    missing = routes(stock) - ours
    assert not ours - routes(stock)
    assert not {path for _, path in missing if path.startswith(("/v1", "/v2", "/inference"))}
    # these need no key: none of them changes what is served
    unguarded = {
        path for method, path in ours if method != "get" and not path.startswith(("/v1", "/v2", "/inference"))
    }
    assert unguarded <= {
        *("/ping", "/tokenize", "/detokenize", "/is_scaling_elastic_ep"),
        *("/invocations", "/generative_scoring"),
    }


@pytest.mark.parametrize("size", [1, 2])
def test_nobody_scales_the_engine(single: Server, size: int) -> None:
    status, answer = ask(single, "POST", "/scale_elastic_ep", {"new_data_parallel_size": size})
    assert (status, answer["error"]["type"]) == (403, "PermissionDeniedError")
    assert "/scale_elastic_ep is closed on a blockfp8 server: " in answer["error"]["message"]
