# SPDX-License-Identifier: Apache-2.0
"""How DeepGEMM's kernels are shared out among processes that compile."""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.compat.warmup import deep_gemm_compile
from vllm_fp8ext.compat.warmup.deep_gemm_compile import CONTEXT_BYTES, process_bytes
from vllm_fp8ext.compat.warmup.deep_gemm_sizes import ordered, spread, write

SHAPES = st.lists(st.integers(1, 100), min_size=2, max_size=3).map(tuple)
COUNTS = st.lists(st.integers(1, 10_000), min_size=1, max_size=50, unique=True)
TAKER = """
import json, sys, time
from vllm_fp8ext.compat.warmup.deep_gemm_sizes import take
for size in take(0):
    print(json.dumps(size), flush=True)
    time.sleep(0.001)
"""


@given(st.dictionaries(SHAPES, COUNTS, min_size=1, max_size=6))
def test_every_size_is_listed_once(sizes: dict[tuple[int, ...], list[int]]) -> None:
    listed = ordered(sizes)
    assert sorted(listed) == sorted((m, *shape) for shape, counts in sizes.items() for m in counts)
    assert {size[1:] for size in listed[: len(sizes)]} == set(sizes), "each shape begins at once"


@given(st.integers(1, 100))
def test_what_is_taken_together_lies_apart(count: int) -> None:
    order = spread(range(count))
    assert sorted(order) == list(range(count))
    first = sorted(order[:8])
    assert all(high - low >= count // 16 for low, high in itertools.pairwise(first))


def test_processes_share_one_list(tmp_path: Path) -> None:
    sizes = [(m, 1536, 2048, 128) for m in range(1, 301)]
    with tempfile.TemporaryFile(buffering=0) as listed:
        write(listed, sizes)
        started = [
            subprocess.Popen([sys.executable, "-P", "-c", TAKER], stdin=listed, stdout=subprocess.PIPE)
            for _ in range(3)
        ]
        outs = [process.communicate()[0].decode().splitlines() for process in started]
    result = [[tuple(json.loads(line)) for line in out] for out in outs]
    assert sorted(size for part in result for size in part) == sizes
    assert all(part == sorted(part) for part in result)


def test_memory_of_a_process_is_that_of_its_largest_product() -> None:
    gate_up = 128 * 1536 * 2048 + 81_792 * (2048 + 2 * 1536)
    assert process_bytes([(8, 512, 512), (81_792, 1536, 2048, 128)]) == CONTEXT_BYTES + 2 * gate_up


def test_what_can_not_be_compiled_ahead_stops_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(count: int) -> bool:
        return deep_gemm_compile._run([(1, 64, 64), (2, 64, 64)], count, torch.device("cpu"))

    monkeypatch.setattr(deep_gemm_compile, "_SECONDS", 1.0)
    monkeypatch.setattr(deep_gemm_compile, "__name__", "no_such_module")  # fails at once
    assert not run(2)
    monkeypatch.setattr(sys, "executable", _script(tmp_path, "sleep 60"))
    assert not run(1)
    monkeypatch.setattr(sys, "executable", _script(tmp_path, "exit 0"))
    assert run(1)


def _script(folder: Path, line: str) -> str:
    file = folder / line.replace(" ", "-")
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)
    return str(file)
