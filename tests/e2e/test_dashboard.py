# SPDX-License-Identifier: Apache-2.0
"""The dashboard's queries have data once a real Prometheus has scraped a server that took updates."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from program_modules import module_of

from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError

from .ask import Stream

PROJECT = Path(__file__).parents[2]
PROGRAM = shutil.which("prometheus")
KV = "K and V", "FP8 scales"
"""Words of the titles of panels that need an FP8 KV cache, which this server lacks."""
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(PROGRAM is None, reason="needs Prometheus, as Debian has it"),
]


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    return module_of("benchmarks/dashboard_picture.py")


@pytest.fixture
def prometheus(single: Server, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the server every second."""
    config = (PROJECT / "examples" / "grafana" / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:8000", f"127.0.0.1:{single.port}").replace(
        "interval: 5s", "interval: 1s"
    )
    (tmp_path / "prometheus.yml").write_text(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    line = [str(PROGRAM), "--config.file", str(tmp_path / "prometheus.yml"), "--web.listen-address", address]
    with (
        subprocess.Popen(
            [*line, "--storage.tsdb.path", str(tmp_path / "data")], stderr=subprocess.DEVNULL
        ) as process,
        httpx.Client(base_url=f"http://{address}") as client,
    ):
        try:
            yield client
        finally:
            process.terminate()


def scrapes(prometheus: httpx.Client, times: int) -> None:
    """Wait until the server was scraped so often since now."""
    start, deadline = time.time(), time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            answer = prometheus.get(
                "/api/v1/query",
                params={"query": f"count_over_time(fp8ext:epoch[{time.time() - start + 1:.0f}s])"},
            ).json()
        except httpx.HTTPError:
            answer = {}
        for series in answer.get("data", {}).get("result", ()):
            if int(series["value"][1]) >= times:
                return
        time.sleep(0.5)
    raise AssertionError("the server was not scraped")


def test_every_panel_has_data(prometheus: httpx.Client, single: Server, picture: ModuleType) -> None:
    scrapes(prometheus, 2)
    with single.client() as client:
        for checkpoint in (LATE, EARLY):
            running = Stream(single)  # an update stalls those that run
            client.push(checkpoint, version=checkpoint.name)
            running.wait()
        with pytest.raises(UpdateError, match="epoch 10000"):
            client.push(LATE, base_epoch=10_000)
    scrapes(prometheus, 4)
    panels = json.loads(picture.DASHBOARD.read_text())["panels"]
    _, empty = picture.draw(picture.shown(panels, []), prometheus, minutes=1)
    assert [title for title in empty if not any(words in title for words in KV)] == []


def test_rows_that_are_left_out_leave_no_gap(picture: ModuleType) -> None:
    panels = json.loads(picture.DASHBOARD.read_text())["panels"]
    shown = picture.shown(panels, ["Updates", "KV cache"])
    assert [panel["title"] for panel in shown if panel["type"] == "row"] == ["Updates", "KV cache"]
    assert [panel["gridPos"]["y"] for panel in shown if panel["type"] == "row"] == [0, 17]
