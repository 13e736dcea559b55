# SPDX-License-Identifier: Apache-2.0
"""Steps of the requests of the step before, in engines."""

from pathlib import Path

import pytest

from .modes import told

pytestmark = pytest.mark.gpu


def test_they_answer_as_vllm_does(tmp_path: Path) -> None:
    """To the bit, whatever is sampled how; and nothing is compiled for any of them."""
    from vllm_fp8ext.bench.generated import write_checkpoint

    write_checkpoint(tmp_path / "model", "Qwen3-1.7B", 0, "cuda")
    modes = "steady", "async", "unsampled", "plain"
    scenarios = told("steady_scenario.py", modes, tmp_path / "model", tmp_path, own_kernels=True)
    steady, early, unsampled, plain = scenarios
    assert plain["followed"] == plain["sampled"] == 0
    alike = 27 * 11
    assert unsampled["sampled"] == 0
    assert unsampled["alike"]["followed"] == steady["alike"]["followed"]
    assert unsampled["answers"] == plain["answers"], "graphs that can't be captured"
    for one in (steady, early):
        assert one["alike"]["followed"] > 0.9 * 5 * 11 * 38, "all but the first of each"
        assert one["alike"]["sampled"] > 0.9 * 5 * 5 * 38, "five ways of eleven"
        assert one["followed"] > one["alike"]["followed"]
        assert len(one["answers"]) in (alike + 31, alike + 32), "but the one that was aborted"
        assert one["preempted"] > 0
        assert one["answers"][:alike] == plain["answers"][:alike]
        assert one["compiled before"] == one["compiled after"]
    assert steady["answers"] == plain["answers"], "requests that come and go in the same steps"
