# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels compile for Hopper GPUs, on machines without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


def test_kernels_compile_for_a_hopper_gpu() -> None:
    """Products run on FP8 tensor cores, of either format, and operands are copied ahead of them."""
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    line = [sys.executable, "-P", str(Path(__file__).with_name("hopper_scenario.py"))]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert len(told) == 22
    for name, code in told.items():
        if name.startswith("block_gemm"):
            form = "e5m2" if "e5m2=True" in name else "e4m3"
            assert code["products"] == [f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{form}.e4m3"]
            assert code["copies ahead"]
