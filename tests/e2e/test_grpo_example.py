# SPDX-License-Identifier: Apache-2.0
"""`examples/grpo/train.py` against a running server: two steps, whose weights are served then."""

import os
import re
import sys
from pathlib import Path

import pytest
from forked_python.processes import run

from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.environment import ADMIN_KEY

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo" / "train.py"
STEP = re.compile(r"step (\d): reward (\S+), mismatch KL (\S+), effective sample size (\S+)")
pytestmark = pytest.mark.full


def test_two_steps(single: Server) -> None:
    line = [sys.executable, "-P", str(EXAMPLE), single.url, "--steps", "2"]
    done = run(line, env=os.environ | {ADMIN_KEY: single.key}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [match.groups() for match in map(STEP.fullmatch, done.stdout.splitlines()) if match]
    assert [step for step, *_ in steps] == ["1", "2"]
    for _, reward, kl, size in steps:
        assert 0 < float(reward) < 1
        assert 0 < float(kl) < 0.01
        assert 0.9 < float(size) <= 1
    with single.client() as client:
        assert client.weights().version == "step-2"
