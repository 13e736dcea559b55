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
from .conftest import NGRAM, OPTIONS, answering, on_early
from .fault_cells import Cell, FaultyServer, run
from .plugins import variables

pytestmark = pytest.mark.full
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
            served = drafted.weights()
            assert served.draft_acceptance is not None
            of_epoch = served.draft_acceptance.served
            assert of_epoch.epoch == served.epoch
            assert of_epoch.accepted_tokens == more - accepted > 0
            accepted = more
        assert drafted.digests().digests == plain.digests().digests
        off = {one.name: one.reason for one in drafted.weights().features if not one.on}
    assert {off[name] for name in PLAIN} == {"speculative decoding"}
    assert "blockfp8: off with speculative decoding:" in drafting.log.read_text()


@pytest.mark.timeout(1200)
def test_a_draft_model_keeps_its_weights(single: Server, tmp_path: Path) -> None:
    """It drafts by the late checkpoint: the early weights accept little of that, the late ones most. The manifest has none of
    its tensors."""
    drafts = {"model": str(LATE), "num_speculative_tokens": 3}
    server = Server(
        EARLY,
        tmp_path / "log",
        arguments=(*OPTIONS, "--speculative-config", json.dumps(drafts)),
        settings={"draft_weights": "keep"},
        variables=variables(tmp_path),
    )
    with answering(server), single.client() as plain, server.client() as drafted:
        assert drafted.manifest()["tensors"].keys() == plain.manifest()["tensors"].keys()
        shares = []
        for folder in (EARLY, LATE):
            for client in (plain, drafted):
                client.push(folder, version=folder.name)
            pairs = zip(answers(server), answers(single), strict=True)
            assert sum(require_alike(*pair) for pair in pairs) > TOKENS * len(PROMPTS) / 2
            acceptance = drafted.weights().draft_acceptance
            assert acceptance is not None
            shares.append(acceptance.served.accepted_tokens / acceptance.served.draft_tokens)
        assert shares[0] < 0.4
        assert shares[1] > 0.6
        assert drafted.digests().digests == plain.digests().digests
        drafted.rollback()
        acceptance = drafted.weights().draft_acceptance
        assert acceptance is not None
        assert acceptance.previous is not None
        assert acceptance.previous.accepted_tokens > 0


@pytest.mark.timeout(1200)
def test_drafts_of_suffixes(single: Server, tmp_path: Path) -> None:
    """Responses of earlier weights make drafts, and no tokens."""
    pytest.importorskip("arctic_inference", reason="pip install arctic-inference==0.1.1")
    drafts = {"method": "suffix", "num_speculative_tokens": 4}
    server = Server(
        EARLY,
        tmp_path / "log",
        arguments=(*OPTIONS, "--speculative-config", json.dumps(drafts)),
        variables=variables(tmp_path),
    )
    with answering(server), single.client() as plain, server.client() as drafted:
        for folder in (EARLY, LATE):
            for client in (plain, drafted):
                client.push(folder, version=folder.name)
            for _ in range(2):  # the second time all of it was drafted before
                pairs = zip(answers(server), answers(single), strict=True)
                assert sum(require_alike(*pair) for pair in pairs) > TOKENS * len(PROMPTS) / 2
        acceptance = drafted.weights().draft_acceptance
        assert acceptance is not None
        assert acceptance.served.accepted_tokens > 0


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
