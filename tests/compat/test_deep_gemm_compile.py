# SPDX-License-Identifier: Apache-2.0
"""How DeepGEMM's kernels are shared out among processes that compile."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.compat import deep_gemm_compile
from vllm_fp8ext.compat.deep_gemm_compile import shares

SHAPES = st.lists(st.integers(1, 100), min_size=2, max_size=3).map(tuple)
COUNTS = st.lists(st.integers(1, 10_000), min_size=1, max_size=50, unique=True)


@given(st.dictionaries(SHAPES, COUNTS, min_size=1, max_size=6), st.integers(1, 32))
def test_every_size_is_compiled_once_in_as_many_processes_as_asked(
    sizes: dict[tuple[int, ...], list[int]], count: int
) -> None:
    parts = shares(sizes, count)
    assert len(parts) <= max(count, len(sizes))
    found = sorted((*shape, tokens) for part in parts for shape, all_tokens in part for tokens in all_tokens)
    assert found == sorted((*shape, tokens) for shape, counts in sizes.items() for tokens in counts)
    for [(_, tokens)] in parts:
        assert tokens == sorted(tokens), "neighbours stay together"


def test_what_can_not_be_compiled_ahead_stops_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deep_gemm_compile, "_SECONDS", 1.0)
    monkeypatch.setattr(deep_gemm_compile, "__name__", "timeit")  # fails at once: no such arguments
    assert not deep_gemm_compile._run(
        [[((64, 64), [1])], [((64, 64), [2])]], torch.bfloat16, torch.device("cpu")
    )
    monkeypatch.setattr(sys, "executable", _script(tmp_path, "sleep 60"))
    assert not deep_gemm_compile._run([[((64, 64), [1])]], torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(sys, "executable", _script(tmp_path, "exit 0"))
    assert deep_gemm_compile._run([[((64, 64), [1])]], torch.bfloat16, torch.device("cpu"))


def _script(folder: Path, line: str) -> str:
    file = folder / line.replace(" ", "-")
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)
    return str(file)
