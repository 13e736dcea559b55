# SPDX-License-Identifier: Apache-2.0
"""Prompts, lengths, timetables, SLOs and options."""

import itertools
import os
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.loadtest.arrivals import timetable
from vllm_fp8ext.loadtest.command import command
from vllm_fp8ext.loadtest.options import Options
from vllm_fp8ext.loadtest.prompts import FIRST_TOKEN, Lengths, Prompt, Shared, prompts
from vllm_fp8ext.loadtest.slo import Slo, verdicts


def some(count: int, seed: str = "0", **more: object) -> list[Prompt]:
    lengths = Lengths.parse("uniform:3,9"), Lengths.parse("lognormal:20,1.5,100")
    return list(itertools.islice(prompts(seed, *lengths, 50, **more), count))  # type: ignore[arg-type]  # what tests choose


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert some(20) == some(20)
    assert some(20) != some(20, seed="1")


def test_prompts_keep_to_their_lengths_and_vocabulary() -> None:
    for prompt in some(300):
        assert 3 <= len(prompt.token_ids) <= 9
        assert all(FIRST_TOKEN <= id < 50 for id in prompt.token_ids)
        assert 1 <= prompt.max_tokens <= 100
        assert len(prompt.text.split()) == len(prompt.token_ids)


def test_prompts_of_a_group_begin_alike() -> None:
    result = {prompt.token_ids[:16] for prompt in some(200, shared=Shared.parse("4x16"))}
    assert len(result) == 4


def test_lognormal_has_its_median_and_a_long_tail() -> None:
    lengths, source = Lengths.parse("lognormal:400,1.0,20000"), random.Random(1)
    drawn = [lengths.draw(source) for _ in range(4000)]
    assert 360 < statistics.median(drawn) < 440
    assert max(drawn) > 4000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-3",
        "uniform:5",
        "uniform:9,3",
        "lognormal:5,1",
        "poisson:3",
        "uniform:a,b",
        "lognormal:5,0,9",
    ],
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="lengths: expected"):
        Lengths.parse(text)


@given(st.floats(0.1, 1000), st.integers(0, 5))
def test_timetables_do_not_depend_on_anything_but_their_seed(rate: float, seed: int) -> None:
    for kind in ("constant", "poisson"):
        first, again = (list(itertools.islice(timetable(kind, rate, str(seed)), 50)) for _ in range(2))
        assert first == again == sorted(first)


def test_rates_are_kept() -> None:
    assert list(itertools.islice(timetable("constant", 4, "0"), 3)) == [0.0, 0.25, 0.5]
    arrivals = list(itertools.islice(timetable("poisson", 10, "0"), 5000))
    assert 480 < arrivals[-1] < 520
    for wrong in (("constant", 0.0), ("weekly", 1.0)):
        with pytest.raises(ValueError, match="expected"):
            next(timetable(*wrong, "0"))


MEASURED = {
    "ttft": {"p99": 0.4, "p99.9": 0.9},
    "itl": {"count": 0},
    "tokens_per_s": 100.0,
    "failed_requests": 0,
}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("ttft_p99<0.5", True),
        ("ttft_p99 <= 0.4", True),
        ("ttft_p99.9<0.5", False),
        ("tokens_per_s>99", True),
        ("tokens_per_s>100", False),
        ("failed_requests<=0", True),
        ("itl_p50<1", False),
    ],
)
def test_slos(text: str, kept: bool) -> None:
    [verdict] = verdicts([Slo.parse(text)], MEASURED)
    assert verdict["kept"] is kept


@pytest.mark.parametrize(
    "text", ["", "ttft<1", "ttft_p98<1", "speed>3", "ttft_p99=1", "ttft_p99<fast", "ttft_p99<1.2.3"]
)
def test_slos_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="SLO: expected NAME<VALUE"):
        Slo.parse(text)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"profile": "spiky"}, "profile: expected one of"),
        ({"endpoint": "embeddings"}, "endpoint: expected one of"),
        ({"update_every": "soon", "checkpoints": ("a",)}, "expected seconds or 'step'"),
        ({"update_every": "0", "checkpoints": ("a",)}, "expected seconds or 'step'"),
        ({"update_every": "5"}, "at least one"),
        ({"vocabulary": 10}, "vocabulary: expected more than 10 token ids, found 10"),
        ({"profile": "poisson", "rate": 0.0}, "rate: expected more than 0"),
        ({"update_every": "step", "checkpoints": ("a",)}, "only the profile rollout"),
        ({"slos": ("ttft<1",)}, "SLO: expected"),
        ({"input_tokens": "many"}, "lengths: expected"),
        ({"shared_prefix": "3"}, "GROUPSxTOKENS"),
    ],
)
def test_options_that_are_not_valid(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**wrong)


@pytest.mark.parametrize(
    ("given", "users"),
    [
        ((), 1),
        (("--processes", "3"), 3),
        (("--processes=3",), 3),
        (("--processes", "-1"), os.cpu_count()),
        (("--processes=2", "--processes=4"), 4),
        (("--report", "--processes"), 1),
    ],
)
def test_as_many_users_as_processes(given: tuple[str, ...], users: int) -> None:
    line = command("http://a", "rollout", 7, "1s", False, given)
    assert line[line.index("--users") + 1] == str(users)


@pytest.mark.parametrize(
    ("web", "given", "option", "opened"),
    [
        (True, (), "--web-host", ["127.0.0.1"]),
        (True, ("--web-host=0.0.0.0",), "--web-host", []),
        (False, (), "--web-host", []),
        (False, ("--processes", "2"), "--master-bind-host", ["127.0.0.1"]),
        (False, ("--processes=2", "--master-bind-host", "10.0.0.1"), "--master-bind-host", ["10.0.0.1"]),
        (False, (), "--master-bind-host", []),
    ],
)
def test_others_reach_what_locust_opens_only_on_demand(
    web: bool, given: tuple[str, ...], option: str, opened: list[str]
) -> None:
    line = command("http://a", "closed", 1, "1s", web, given)
    assert [after for before, after in itertools.pairwise(line) if before == option] == opened


@pytest.mark.parametrize(
    ("options", "there"), [({}, False), ({"files": True}, True), ({"update_through": "stock"}, True)], ids=str
)
def test_paths_of_a_server_are_told_as_they_are(options: dict[str, Any], there: bool) -> None:
    chosen = Options(update_every="5", checkpoints=("step/1",), **options)
    assert chosen.pusher("http://rollout:8000")["checkpoints"] == [
        "step/1" if there else os.path.abspath("step/1")
    ]
