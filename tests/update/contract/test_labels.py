# SPDX-License-Identifier: Apache-2.0
"""Labels through the one string that vLLM carries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.update.contract.labels import Label, Step, default_version, first_label


@given(st.integers(0, 2**63), st.text(), st.sampled_from(["", "0a1b"]), st.integers(0, 9))
def test_labels_survive_whatever_the_version_is(
    epoch: int, version: str, instance: str, aborted: int
) -> None:
    label = Label(epoch, version, instance, aborted)
    assert Label.decode(label.encode()) == label


@given(st.tuples(st.integers(0, 99), st.text(max_size=3)), st.tuples(st.integers(0, 99), st.text(max_size=3)))
def test_different_labels_are_different_strings(first: tuple[int, str], second: tuple[int, str]) -> None:
    """Spans are told apart by the string alone: a version that comes again in another epoch is another
    label."""
    assert (Label(*first).encode() == Label(*second).encode()) == (first == second)


@pytest.mark.parametrize("text", ["default", "", "7", "epoch-3"])
def test_a_string_that_is_no_label_is_epoch_zero(text: str) -> None:
    assert Label.decode(text) == Label(0, "epoch-0")


def test_default_version() -> None:
    assert default_version(12) == "epoch-12"


@given(st.dictionaries(st.text(), st.lists(st.builds(Label, st.integers(0, 99), st.text()), max_size=3)))
def test_steps_survive_whatever_requests_are_called(held: dict[str, list[Label]]) -> None:
    step = Step(
        Label(7, "step 7").encode(), {name: [one.encode() for one in some] for name, some in held.items()}
    )
    assert Step.decode(step.encode()) == step


def test_a_step_of_which_nothing_else_is_told_is_its_label() -> None:
    assert Step("7").encode() == "7"
    assert Step.decode("default") == Step("default", {})


def test_an_epoch_follows_in_the_same_life_and_knows_when_requests_were_ended() -> None:
    first = first_label("0a1b")
    assert first.served() == {"epoch": 0, "version": "epoch-0", "instance": "0a1b"}
    kept = first.next("a").next("b", aborts=True).next("c")
    assert kept == Label(3, "c", "0a1b", 2)
    assert first_label("").served()["instance"] is None
