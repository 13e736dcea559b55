# SPDX-License-Identifier: Apache-2.0
"""The KV caches of two real engines on this CPU, each in a process of its own: which blocks requests hold, where K and V lie
in them, and what is recorded of K, V and Q, against what reached the cache and the layers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python.processes import run

pytestmark = pytest.mark.fp8_kv

TOKENS = 33 + 100 + 5
"""Of the prompts."""


def _told(kind: str, factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = factory.mktemp(kind) / "facts.json"
    scenario = Path(__file__).with_name("kv_scenario.py")
    line = [sys.executable, "-P", str(scenario), kind, str(file)]
    done = run(line, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {"kind": kind, **json.loads(file.read_text())}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the early checkpoint (`kv_scenario`)."""
    return _told("plain", tmp_path_factory)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a model with three KV cache groups, two of which look at a window."""
    return _told("hybrid", tmp_path_factory)


@pytest.fixture(params=["plain", pytest.param("hybrid", marks=pytest.mark.full)])
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of each of them."""
    result: dict[str, Any] = request.getfixturevalue(request.param)
    return result


def test_nobody_holds_blocks_without_requests(facts: dict[str, Any]) -> None:
    assert not any(facts["idle"])
    assert not any(facts["after"])


def test_blocks_of_running_requests_are_found(plain: dict[str, Any]) -> None:
    """All blocks that were written, since nothing has finished."""
    ((layers, size, blocks),) = plain["held"]
    assert size == 32
    assert len(blocks) > 8
    assert plain["written"] == dict.fromkeys(layers, blocks)


@pytest.mark.full
def test_blocks_are_told_by_group(hybrid: dict[str, Any]) -> None:
    """Those that a window has left behind are held no more; a block belongs to one group."""
    groups = hybrid["held"]
    assert [len(layers) for layers, _, _ in groups] == [2, 2, 2]
    for layers, _, blocks in groups:
        full = layers[0].startswith("model.layers.2.")
        for layer in layers:
            written = set(hybrid["written"][layer])
            assert set(blocks) == written if full else set(blocks) < written
    every = [block for _, _, blocks in groups for block in blocks]
    assert len(set(every)) == len(every)


def test_views_hold_the_heads_that_were_written(facts: dict[str, Any]) -> None:
    assert facts["views"]
    assert facts["compared"] > 20


def test_rewritten_blocks_stand_for_the_same_values(facts: dict[str, Any]) -> None:
    """For all codes of all layers of the held blocks, with scales divided by four."""
    assert facts["values stay"]
    head_bytes = 64 if facts["kind"] == "plain" else 32
    codes = sum(
        2 * 2 * head_bytes * size * len(layers) * len(blocks) for layers, size, blocks in facts["held"]
    )
    assert facts["rescaled"] == [codes, 0, 0]


def test_requests_go_on_over_rewritten_blocks(plain: dict[str, Any]) -> None:
    """As if nothing had happened; not so when only the scales change."""
    assert plain["sampled after"] == plain["sampled"]
    assert plain["sampled without"] != plain["sampled"]


def test_unknown_caches_are_refused(facts: dict[str, Any]) -> None:
    dtype, sizes, shape = facts["refusals"]
    assert "expected a KV cache of dtype fp8 (E4M3), found fp8_e5m2" in dtype
    assert "heads of K and V of one size" in sizes
    assert "expected a cache of bytes [blocks, 2, block_size," in shape


def elements(facts: dict[str, Any], tokens: int) -> list[list[int]]:
    """Of one head of K, V and Q, in each layer."""
    layers, width = (3, 64) if facts["kind"] == "plain" else (6, 32)
    return [[tokens * width, tokens * width, tokens * width * 2]] * layers


def test_all_steps_are_recorded(facts: dict[str, Any]) -> None:
    """The same amaxes, counts and saturated elements as were seen where K and V are written and Q comes in."""
    result = facts["recorded"]
    assert result["equal"]
    assert result["elements"] == elements(facts, TOKENS + 3 * (result["steps"] - 1))
    assert result["saturated"] == 0


def test_one_step_in_three_is_recorded(facts: dict[str, Any]) -> None:
    """With scales so small that elements are saturated."""
    result = facts["recorded some"]
    assert result["equal"]
    assert result["steps"] == 7
    assert result["elements"] == elements(facts, TOKENS + 3 * 2)
    assert result["saturated"] > 0


def test_what_was_taken_is_gone(facts: dict[str, Any]) -> None:
    assert facts["recorded"]["empty"]


def test_layers_are_left_as_they_were(facts: dict[str, Any]) -> None:
    assert facts["recorded"]["left alone"]
