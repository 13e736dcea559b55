# SPDX-License-Identifier: Apache-2.0
"""Layouts of measured servers over GPUs."""

import pytest

from vllm_fp8ext.bench.layouts import Layout
from vllm_fp8ext.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("one", Layout()),
        ("tp2", Layout(tensor=2)),
        ("dp4", Layout(data=4)),
        ("pp2", Layout(pipeline=2)),
        ("replicas2", Layout(replicas=2)),
        ("tp2+dp3", Layout(tensor=2, data=3)),
    ],
)
def test_a_layout_is_read_as_it_is_written(text: str, layout: Layout) -> None:
    assert Layout.of(text) == layout
    assert str(layout) == text


@pytest.mark.parametrize("text", ["", "tp", "tp0", "ep2", "tp2+tp3", "tp2,dp2", "2"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected one, or such as tp2"):
        Layout.of(text)


def test_replicas_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7")
    layout = Layout(tensor=2, replicas=2)
    assert [layout.variables(replica)["CUDA_VISIBLE_DEVICES"] for replica in range(2)] == ["4,5", "GPU-6,7"]
    with pytest.raises(ConfigError, match=r"layout tp2\+replicas3: expected 6 GPUs, found 4"):
        Layout(tensor=2, replicas=3).variables(2)


def test_ranks_of_one_server_are_arguments_of_it() -> None:
    assert Layout(replicas=3).arguments() == []
    assert Layout(data=2).arguments() == ["--data-parallel-size", "2"]
    assert Layout(pipeline=2).arguments()[:2] == ["--pipeline-parallel-size", "2"]
    arguments = Layout(tensor=2, data=2).arguments()
    assert "mp" in arguments
    assert arguments[arguments.index("--tensor-parallel-size") + 1] == "2"
    assert arguments[arguments.index("--data-parallel-size") + 1] == "2"
