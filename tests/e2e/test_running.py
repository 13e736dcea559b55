# SPDX-License-Identifier: Apache-2.0
"""What a commit does to running requests, to the prefix cache, and to what responses say about it."""

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from safetensors.torch import load_file
from vllm.entrypoints.openai.completion.protocol import CompletionResponseStreamChoice

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import MODEL, Server
from vllm_fp8ext.serve.safetensors_body import bodies
from vllm_fp8ext.serve.safetensors_file import ranges_of

from .ask import ATTEMPTS, Stream, complete, metric, nats_behind
from .conftest import DRAFTS, FIRST

TOKENS = 300
"""Tokens of a request that a commit meets; enough that it still runs then."""
MANY_TOKENS = 500
"""Tokens of a request that several commits meet."""
BEAM_TOKENS = 60
"""Of a beam search, each of whose tokens is two requests."""
BLOCK = 32
"""Tokens in a KV-cache block of these servers."""
PROMPT = "123+456=9750" * 8
"""96 tokens: three full blocks."""


def _straddle(
    server: Server, running: str, prompt: str = "111+222=", tokens: int = TOKENS, version: str = "late"
) -> dict[str, Any]:
    """A streamed completion; when its first token came, the late checkpoint, staged before, was committed. Once more if
    all its tokens were there before the commit was, as they may be on a busy machine."""
    for _ in range(ATTEMPTS):
        straddling = _commit_under(server, running, prompt, tokens, version)
        if len(straddling["weight_versions"]) > 1:
            return straddling
    pytest.fail(
        f"in {ATTEMPTS} attempts no request got tokens of both weights: {straddling['weight_versions']}"
    )


def _commit_under(server: Server, running: str, prompt: str, tokens: int, version: str) -> dict[str, Any]:
    [body] = bodies(ranges_of(LATE), 1 << 30)
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    asked |= {"ignore_eos": True, "return_token_ids": True}
    result: dict[str, Any] = {
        "prompt": prompt,
        "prompt_token_ids": [],
        "token_ids": [],
        "weight_versions": [],
    }
    with server.client() as weights:
        weights.push(EARLY, version="early")
        update = weights.open(version=version, running=running)  # type: ignore[arg-type]  # a parameter's text
        weights.put_chunk(update.id, 0, body)
        weights.prepare(update.id)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=580) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                if not result["token_ids"]:
                    weights.commit(update.id)
                for name in ("prompt_token_ids", "token_ids", "weight_versions"):
                    result[name] += choice.get(name) or []
    return result


def _cached(server: Server, prompt: str | list[int]) -> int:
    """Tokens of a prompt that were found in the prefix cache."""
    details = complete(server, prompt, 1)["usage"]["prompt_tokens_details"]
    return details["cached_tokens"] if details else 0


def _check_spans(spans: list[dict[str, Any]], tokens: int, *versions: str) -> None:
    assert [span["version"] for span in spans] == list(versions)
    assert spans[0]["start"] == 0
    assert spans[-1]["end"] == tokens
    assert all(a["end"] == b["start"] and b["epoch"] == a["epoch"] + 1 for a, b in pairwise(spans))


@pytest.mark.parametrize(
    ("server", "running"),
    [
        ("tp1", "keep"),
        ("tp2", "recompute"),
        pytest.param("tp1", "recompute", marks=pytest.mark.full),
        pytest.param("tp2", "keep", marks=pytest.mark.full),
        pytest.param("drafts", "keep", marks=pytest.mark.full),
        pytest.param("drafts", "recompute", marks=pytest.mark.full),
    ],
    indirect=["server"],
)
def test_a_running_request_gets_both_weights(server: Server, running: str):
    preempted = metric(server, "vllm:num_preemptions_total")
    _check_spans(_straddle(server, running)["weight_versions"], TOKENS, "early", "late")
    more = metric(server, "vllm:num_preemptions_total") - preempted
    assert more >= 1 if running == "recompute" else more == 0


@pytest.mark.parametrize("server", ["tp1", DRAFTS], indirect=True)
def test_recompute_continues_as_the_new_weights_would(server: Server):
    """After the commit every token is what the new weights sample for all that stands before it."""
    straddling = _straddle(server, "recompute")
    tokens, switch = straddling["token_ids"], straddling["weight_versions"][1]["start"]
    before = straddling["prompt_token_ids"] + tokens[:switch]
    after = tokens[switch : switch + 16]
    fresh = complete(server, before, len(after), ignore_eos=True)["choices"][0]["token_ids"]
    assert fresh == after


@pytest.mark.parametrize(
    "server", ["tp1", pytest.param("tp2", marks=pytest.mark.full), DRAFTS], indirect=True
)
def test_every_token_is_of_the_weights_that_its_label_names(server: Server, spoiled: Callable[..., Path]):
    """Weights whose last norm is negated write the same K and V, and sample the token that the others like least. A rollback
    goes from the ones to the others, and back. Each then judges the tokens that are labelled with it, in a prompt, where it
    differs from decoding by up to two nats: its choice lies no more behind its likeliest token, the other's 11 or more."""
    norm = load_file(LATE / "model.safetensors")["model.norm.weight"]
    folders = {"late": LATE, "negated": spoiled("negated", model__norm__weight=-norm)}
    with server.client() as client:
        for version, folder in folders.items():
            client.push(folder, version=version)
        # where other processes have the cores, a response may be over before it has met enough of them
        for _ in range(3):
            stream = Stream(server, tokens=MANY_TOKENS)
            while stream.running:
                client.rollback()
                time.sleep(0.1)  # for the request: two cores may be all that there is
            stream.wait()
            spans, tokens = stream.weight_versions, stream.token_ids
            if len(spans) > 4:
                break
        assert len(spans) > 4
        assert {span["version"] for span in spans} == set(folders)
        assert (spans[-1]["end"], len(tokens)) == (MANY_TOKENS, MANY_TOKENS)
        prompt = complete(server, "12+34=", 1)["choices"][0]["prompt_token_ids"]
        for version in ("negated", "late"):
            client.push(folders[version], version=version)
            behind = nats_behind(server, prompt, tokens)
            for span in spans:
                own, result = span["version"] == version, behind[span["start"] : span["end"]]
                assert all(nats < 5 if own else nats > 5 for nats in result), (version, span, result)


@pytest.mark.parametrize("server", ["tp1", "tp2", DRAFTS], indirect=True)
def test_cached_blocks_are_not_found_across_epochs(server: Server):
    with server.client() as client:
        _cached(server, PROMPT)
        assert _cached(server, PROMPT) >= BLOCK
        for change in (
            lambda: client.push(LATE, version="late"),
            lambda: client.rollback(),
            lambda: client.push(LATE, version="late", running="recompute"),
            lambda: client.rollback("recompute"),
        ):
            change()
            assert _cached(server, PROMPT) == 0
            assert _cached(server, PROMPT) >= BLOCK


@pytest.mark.parametrize("server", ["tp1", DRAFTS], indirect=True)
def test_a_kept_request_leaves_nothing_behind_in_the_cache(server: Server):
    """Its later blocks hold K and V that mix both weights: no request of the new epoch may find them."""
    straddling = _straddle(server, "keep", prompt=PROMPT, tokens=300)
    assert _cached(server, straddling["prompt"]) == 0
    whole = straddling["prompt_token_ids"] + straddling["token_ids"]
    assert 0 < _cached(server, whole) <= len(straddling["prompt_token_ids"])


@FIRST
@pytest.mark.parametrize("asked", [False, True], ids=["always", "as vLLM 0.33 is asked"])
def test_weight_versions_with_the_openai_client(server: Server, asked: bool):
    with server.client() as client:
        client.push(EARLY, version="step 7")
        served = client.weights()
    assert served.instance
    labelled = {"version": "step 7", "epoch": served.epoch, "instance": served.instance}
    expected = [{**labelled, "start": 0, "end": 5}]
    openai = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 5,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, **({"return_weight_versions": True} if asked else {})},
    }
    messages: Any = [{"role": "user", "content": "123+456="}]
    completion = openai.completions.create(prompt=["1+", "2+"], n=2, **{**options, "temperature": 1})
    assert [choice.weight_versions for choice in completion.choices] == [expected] * 4  # type: ignore[attr-defined]  # our field
    chat = openai.chat.completions.create(messages=messages, **options)
    assert chat.choices[0].weight_versions == expected  # type: ignore[attr-defined]  # our field
    # vLLM 0.33 has the field in chunks without spans too
    says_null = "weight_versions" in CompletionResponseStreamChoice.model_fields
    for events in (
        openai.completions.create(prompt="123+456=", stream=True, **options),
        openai.chat.completions.create(messages=messages, stream=True, **options),
    ):
        choices = [choice for event in events for choice in event.choices]
        carrying = [choice for choice in choices if hasattr(choice, "weight_versions")]
        if says_null:
            carrying = [choice for choice in carrying if choice.weight_versions is not None]
        assert [choice.weight_versions for choice in carrying] == [expected]  # type: ignore[attr-defined]  # our field
        assert carrying[0].finish_reason == "length"
    openai.close()


@pytest.mark.parametrize("stream", [False, True])
def test_weight_versions_of_responses_and_messages(single: Server, stream: bool):
    with single.client() as client:
        client.push(EARLY, version="step 8")
        served = client.weights()
    body = {"model": MODEL, "temperature": 0, "stream": stream}
    question = {"input": "123+456=", "max_output_tokens": 5}
    said = {"messages": [{"role": "user", "content": "123+456="}], "max_tokens": 5}
    for path, more, last in (
        ("/v1/responses", question, "response.completed"),
        ("/v1/messages", said, "message_delta"),
    ):
        reply = httpx.post(f"{single.url}{path}", json={**body, **more}, timeout=120)
        assert reply.status_code == 200, reply.text
        if stream:
            [told] = [part for part in reply.text.split("\n\n") if part.startswith(f"event: {last}\n")]
            event = json.loads(told.partition("data: ")[2])
            answer = event.get("response", event)
        else:
            answer = reply.json()
        [span] = answer["weight_versions"]
        assert (span["version"], span["epoch"], span["start"]) == ("step 8", served.epoch, 0)
        assert (span["end"], span["instance"]) == (answer["usage"]["output_tokens"], served.instance)


def _search(server: Server, choices: list[dict[str, Any]]) -> None:
    """A beam search, of which nothing is streamed."""
    asked = {"use_beam_search": True, "n": 2, "ignore_eos": True}
    choices += complete(server, "12+34=", BEAM_TOKENS, **asked)["choices"]


def _beams(server: Server, running: str) -> list[dict[str, Any]]:
    """Choices of a beam search that a commit of the late checkpoint met."""
    [body] = bodies(ranges_of(LATE), 1 << 30)
    for attempt in range(ATTEMPTS):
        collected: list[dict[str, Any]] = []
        with server.client() as weights:
            weights.push(EARLY, version="early")
            update = weights.open(version="late", running=running)  # type: ignore[arg-type]  # a parameter's text
            weights.put_chunk(update.id, 0, body)
            weights.prepare(update.id)
            search = threading.Thread(target=_search, args=(server, collected))
            search.start()
            time.sleep(0.1 * (attempt + 1))
            weights.commit(update.id)
            search.join()
        if len(collected[0]["weight_versions"]) > 1 or collected[0]["finish_reason"] == "abort":
            return collected
    pytest.fail(f"in {ATTEMPTS} attempts no search met a commit: {collected}")


@FIRST
def test_beams_name_the_weights_of_each_token(server: Server):
    beams = _beams(server, "keep")
    assert len(beams) == 2
    for beam in beams:
        _check_spans(beam["weight_versions"], BEAM_TOKENS, "early", "late")


@FIRST
def test_a_commit_with_abort_ends_beams_too(server: Server):
    """Between two steps of theirs no request runs that it could end."""
    beams = _beams(server, "abort")
    assert len({len(beam["token_ids"]) for beam in beams}) == 1
    for beam in beams:
        assert beam["finish_reason"] == "abort"
        assert len(beam["token_ids"]) < BEAM_TOKENS
        _check_spans(beam["weight_versions"], len(beam["token_ids"]), "early")


def test_each_answer_of_a_batch_of_chats_names_its_weights(single: Server):
    with single.client() as client:
        served = client.weights()
    body = {"messages": [[{"role": "user", "content": text}] for text in ("1+1=", "2+2=")], "max_tokens": 5}
    body |= {"model": MODEL, "ignore_eos": True}
    reply = httpx.post(f"{single.url}/v1/chat/completions/batch", json=body, timeout=120)
    span = {"version": "early", "epoch": served.epoch, "instance": served.instance, "start": 0, "end": 5}
    assert [choice["weight_versions"] for choice in reply.raise_for_status().json()["choices"]] == [
        [span]
    ] * 2


def test_a_repeated_version_is_still_two_spans(single: Server):
    _check_spans(_straddle(single, "keep", version="early")["weight_versions"], TOKENS, "early", "early")
    with single.client() as client:
        client.push(EARLY, version="early")
