# SPDX-License-Identifier: Apache-2.0
"""Graphs of whole steps with as many requests as there can be."""

from pathlib import Path

import pytest

from .modes import apart, told

pytestmark = pytest.mark.gpu


def test_many_requests_are_answered_as_in_pieces(tmp_path: Path) -> None:
    """Steps that mix prompts and over 200 requests that decode, one of them with a longer context than prompts may have; and
    nothing is compiled for any of them."""
    from vllm_fp8ext.bench.generated import write_checkpoint

    write_checkpoint(tmp_path / "model", "Qwen3-0.6B", 0, "cuda")
    modes = "whole", "pieces", "eager"
    whole, pieces, eager = told(
        "many_requests_scenario.py", modes, tmp_path / "model", tmp_path, own_kernels=True
    )
    assert len(whole["whole"]) >= 27, "every step in which requests join"
    assert max(whole["whole"]) == 256
    assert pieces["whole"] == eager["whole"] == []
    for one in (whole, pieces):
        assert one["compiled before"] == one["compiled after"]
        assert one["compiled before"]["deep_gemm"] > 0
    assert len(whole["logprobs"]) == 221
    assert apart(whole, pieces) < 0.1 * apart(eager, pieces)
