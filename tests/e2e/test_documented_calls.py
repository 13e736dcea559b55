# SPDX-License-Identifier: Apache-2.0
"""The curl examples of docs/http-api.md, run as one script."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.demo.server import Server

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"


def test_curl_examples(single: Server, folder: Path, tmp_path: Path, spoiled: Callable[..., Path]):
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    checkpoint = folder / "documented"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "model.safetensors").write_bytes((LATE / "model.safetensors").read_bytes())
    script = "set -euo pipefail\n" + "\n".join(blocks)
    env = {**os.environ, "URL": single.url, "FP8EXT_ADMIN_KEY": single.key, "CHECKPOINT": str(checkpoint)}
    done = subprocess.run(
        ["bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
