# SPDX-License-Identifier: Apache-2.0
"""The process that pushes weights during a load test: what becomes of an update when the run ends."""

import threading
import time
from pathlib import Path
from typing import Any

import gevent
import pytest
import torch
from safetensors.torch import save_file

from vllm_fp8ext.loadtest.weight_updates import Pusher

from .server import KEY, Handler, Server, chunk

SECONDS = 60


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("call", ["POST /updates", chunk(0), "POST /updates/*/commit"])
def test_an_update_under_way_is_given_up_when_the_run_ends(
    server: Server, tmp_path: Path, call: str, files: bool
) -> None:
    """It would keep all others out until it is forgotten."""
    if files:
        call = call.replace(chunk(0), "POST /updates/*/files")
    begun = threading.Event()

    def hold(handler: Handler) -> bool:
        body = handler.body()
        if call == "POST /updates":
            server.handle(call, body, handler.headers)
        begun.set()
        time.sleep(1.0)
        handler.hang_up()
        return True

    server.faults[call] = [hold]
    save_file({"a": torch.ones(10)}, tmp_path / "model.safetensors")
    options: dict[str, Any] = {"through": "fp8ext", "url": server.url, "key": KEY, "running": "keep"}
    pusher = Pusher({**options, "files": files, "checkpoints": [str(tmp_path)]})
    pushing = gevent.spawn(pusher.push)
    for _ in range(20 * SECONDS):
        gevent.sleep(0.05)
        if begun.is_set():
            break
    pushing.kill()
    pusher.close()
    assert begun.is_set()
    assert server.states == ["abandoned"]
