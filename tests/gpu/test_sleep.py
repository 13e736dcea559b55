# SPDX-License-Identifier: Apache-2.0
"""Sleep, in which GPU memory is really given back, with CUDA graphs and our own kernels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

GIB = 1 << 30


def test_an_engine_serves_the_same_after_it_slept(tmp_path: Path) -> None:
    """At level 1 as it was; at level 2, where all memory comes back with anything in it, after an update."""
    from vllm_fp8ext.bench.generated import write_checkpoint

    write_checkpoint(tmp_path / "model", "Qwen3-0.6B", 0, "cuda")
    scenario, facts = Path(__file__).with_name("sleep_scenario.py"), tmp_path / "facts.json"
    line = [sys.executable, "-P", str(scenario), str(tmp_path / "model"), str(facts)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    loaded = json.loads(facts.read_text())
    assert len({token for row in loaded["cold"] for token in row}) > 3
    for level, state in ((1, "serving"), (2, "poisoned")):
        assert loaded[f"given at level {level}"] > 3 * GIB, "the KV cache's at least"
        assert loaded[f"refused at level {level}"] == "asleep"
        assert loaded[f"state after level {level}"] == state
        assert loaded[f"digests after level {level}"]
        assert loaded[f"scales after level {level}"]
        assert loaded[f"addresses after level {level}"]
        assert loaded[f"sampled after level {level}"] == loaded["cold"], f"level {level}"
        pairs = zip(loaded[f"beside after level {level}"], loaded["beside"], strict=True)
        assert sum(one == other for one, other in pairs) >= 4, "of six, in batches that differ"
    assert loaded["verified after level 2"] == "again"
