# SPDX-License-Identifier: Apache-2.0
"""What is asked of a stock server, over HTTP: a server that notes it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from vllm_fp8ext.loadtest.weight_updates import StockUpdates

PAUSE = "/pause?mode=keep&clear_cache=false"


@pytest.fixture(params=[True, False], ids=["loads", "fails"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str], bool]]:
    """Its URL, the paths that were asked for, and whether it loads."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            loads = self.path == "/collective_rpc"
            asked.append(self.path)
            if loads:
                wanted = {"method": "reload_weights", "kwargs": {"weights_path": "/checkpoints/late"}}
                assert json.loads(body) == wanted
            self.send_response(500 if loads and not request.param else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}/", asked, request.param
        serving.shutdown()
        thread.join()


def test_generation_goes_on_whatever_becomes_of_a_reload(server: tuple[str, list[str], bool]) -> None:
    url, asked, loads = server
    update = StockUpdates(url, [Path("/checkpoints/late")]).push()
    assert (update.error is None) == loads
    assert asked == [PAUSE, "/collective_rpc", *(["/reset_prefix_cache"] if loads else []), "/resume"]
