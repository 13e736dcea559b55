# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with live updates: what drafts must leave as it is. `test_running.py` has what a commit does to
requests with drafts."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.checkpoints import EARLY, LATE, problems
from vllm_fp8ext.demo.server import Server

from .ask import complete, metric
from .conftest import NGRAM, on_early
from .fault_cells import Cell, FaultyServer, run

PROMPTS = [problem.prompt for problem in problems(2, seed=7)] + ["123+456=9750" * 8]
TOKENS = 32
LOGPROBS = 3
ROUNDING = 0.5
"""Nats between logprobs of steps of one token and of several: a few units in the last place of logits in BF16."""
PLAIN = {"decode_step_reuse", "sampling_cudagraph", "mixed_full_cudagraph"}
"""Features for engines without drafts."""
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


def answers(server: Server) -> list[dict[str, Any]]:
    """Greedy choices of the prompts, one request at a time, with logprobs."""
    return [
        complete(server, prompt, TOKENS, logprobs=LOGPROBS, ignore_eos=True)["choices"][0]
        for prompt in PROMPTS
    ]


def require_alike(with_drafts: dict[str, Any], without: dict[str, Any]) -> int:
    """Compare two choices field by field, up to a token that is as likely as another. Returns the tokens before it.

    Products of a step of several tokens round otherwise than those of one.
    """
    spans = [choice.pop("weight_versions") for choice in (with_drafts, without)]
    assert [[(span["start"], span["end"], span["version"]) for span in each] for each in spans] == [
        [(0, TOKENS, spans[1][0]["version"])]
    ] * 2
    drafted, plain = (choice.pop("logprobs") for choice in (with_drafts, without))
    assert with_drafts.keys() == without.keys()
    assert drafted.keys() == plain.keys()
    assert {len(values) for values in (*drafted.values(), *plain.values())} == {TOKENS}
    for place in range(TOKENS):
        candidates = sorted(plain["top_logprobs"][place].values(), reverse=True)
        if drafted["tokens"][place] != plain["tokens"][place]:
            assert candidates[0] - candidates[1] < ROUNDING
            return place
        assert drafted["text_offset"][place] == plain["text_offset"][place]
        assert drafted["token_logprobs"][place] == pytest.approx(plain["token_logprobs"][place], abs=ROUNDING)
        assert sorted(drafted["top_logprobs"][place].values(), reverse=True) == pytest.approx(
            candidates, abs=ROUNDING
        )
    assert with_drafts == without
    return TOKENS


def test_answers_are_those_without_drafts(single: Server, drafting: Server) -> None:
    """Before an update, after it and after a rollback; what does not apply to steps with drafts says so."""
    on_early(drafting)
    accepted = metric(drafting, ACCEPTED)
    with single.client() as plain, drafting.client() as drafted:
        changes = (
            lambda client: client.push(EARLY, version="early"),
            lambda client: client.push(LATE, version="late"),
            lambda client: client.rollback(),
        )
        for change in changes:
            for client in (plain, drafted):
                change(client)
            pairs = zip(answers(drafting), answers(single), strict=True)
            assert sum(require_alike(*pair) for pair in pairs) > TOKENS * len(PROMPTS) / 2
            more = metric(drafting, ACCEPTED)
            assert more > accepted
            accepted = more
        assert drafted.digests().digests == plain.digests().digests
        off = {one.name: one.reason for one in drafted.weights().features if not one.on}
    assert {off[name] for name in PLAIN} == {"speculative decoding"}
    assert "blockfp8: speculative decoding switches off:" in drafting.log.read_text()


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(1200)
def test_a_fault_at_a_commit_with_drafts_in_flight(tmp_path: Path) -> None:
    """A swap that fails is undone, and requests go on; where it can't be undone, a full update heals; a death ends all."""
    options = ("--speculative-config", json.dumps(NGRAM))
    with FaultyServer(tmp_path, 1, False, *options, deadline_seconds=120.0) as server:
        server.wait()
        for cell in (
            Cell("exception", "commit", 1),
            Cell("exception", "rollback", 1),
            Cell("exception", "commit", 1, lasting=True),
            Cell("kill -9", "commit", 1),
        ):
            run(server, cell)
