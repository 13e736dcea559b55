# SPDX-License-Identifier: Apache-2.0
"""The canary: what the new weights say before anybody is served by them is what they say afterwards."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError

from .ask import complete, state
from .conftest import FIRST

PROMPTS = [[3 + 7 * index % 100 for index in range(length)] for length in (5, 64, 300)]


def _send(client, update, path: Path) -> None:
    body = path.read_bytes()
    client.put_chunk(update.id, 0, body, len(body))


@FIRST
def test_its_perplexity_is_that_of_the_served_model(server: Server):
    with server.client() as client:
        update = client.open(version="late", canary={"prompts": PROMPTS})
        _send(client, update, LATE / "model.safetensors")
        told = client.prepare(update.id).canary_perplexity
        client.commit(update.id)
    total, count = 0.0, 0
    for prompt in PROMPTS:
        rows = complete(server, prompt, 1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
        for token, row in zip(prompt[1:], rows[1:], strict=True):
            total += row[str(token)]["logprob"]
            count += 1
    assert told == pytest.approx(math.exp(-total / count), rel=0.02)


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("tp1", "perplexity"),
        ("tp2", "non-finite"),
        pytest.param("tp1", "non-finite", marks=pytest.mark.full),
        pytest.param("tp2", "perplexity", marks=pytest.mark.full),
    ],
    indirect=["server"],
)
def test_refused(server: Server, spoiled: Callable[..., Path], reason: str):
    before = state(server)
    huge = spoiled("huge", model__norm__weight=torch.full((256,), 3e38, dtype=torch.bfloat16))
    path, canary = {
        "perplexity": (LATE / "model.safetensors", {"prompts": PROMPTS, "max_perplexity": 1.5}),
        "non-finite": (huge, None),
    }[reason]
    with server.client() as client:
        update = client.open(canary=canary)
        _send(client, update, path)
        for call in (client.prepare, client.commit):
            with pytest.raises(UpdateError) as refused:
                call(update.id)
            assert (refused.value.kind, refused.value.status) == ("canary-refused", 422)
            assert refused.value.details["reason"] == reason
        client.abandon(update.id)
        assert state(server) == before
        client.push(EARLY, version="early")


@pytest.mark.parametrize(
    ("canary", "match"),
    [
        ({"prompts": [[1, 128]]}, "below 128, found 128"),
        ({"prompts": [[1] * 2049]}, "2 to 2048 tokens"),
        ({"max_perplexity": 3.0}, "needs prompts"),
    ],
)
def test_bad_canaries(single: Server, canary, match):
    with single.client() as client, pytest.raises(UpdateError, match=match) as refused:
        client.open(canary=canary)
    assert (refused.value.kind, refused.value.status) == ("invalid-request", 422)
