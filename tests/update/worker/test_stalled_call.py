# SPDX-License-Identifier: Apache-2.0
"""A worker ends in which a call waits in vain, and no other."""

import subprocess
import sys

import pytest

CALLS = {
    "nothing comes": ("watch.expect(0.1); time.sleep(60)", 70),
    "it returns": ("watch.expect(0.1); watch.returned(); time.sleep(0.5)", 0),
    "more comes": ("[(watch.expect(0.5), time.sleep(0.2)) for _ in range(5)]", 0),
    "another call waits in vain": (
        "watch.expect(0.1); watch.returned(); watch.expect(0.1); time.sleep(60)",
        70,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_process_ends_when_nothing_comes(name: str) -> None:
    body, code = CALLS[name]
    text = f"import time\nfrom vllm_fp8ext.update.worker.stalled_call import StalledCall\nwatch = StalledCall()\n{body}"
    done = subprocess.run([sys.executable, "-P", "-c", text], capture_output=True, text=True, timeout=50)
    assert done.returncode == code, done.stderr
    assert ("has neither returned" in done.stderr) == (code == 70)
