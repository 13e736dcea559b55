# SPDX-License-Identifier: Apache-2.0
"""The report: files, exit codes, and a page that a browser shows without asking anybody for anything."""

import base64
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from vllm_fp8ext.loadtest import report
from vllm_fp8ext.loadtest.html_report import page
from vllm_fp8ext.loadtest.records import (
    RequestRecord,
    RunRecords,
    ScrapeRecord,
    Span,
    StepRecord,
    UpdateRecord,
)


def made_up(**options: object) -> RunRecords:
    events = [(100.5 + n / 10, 1) for n in range(100)]
    spans = [Span("early", 3, 0, 60), Span("<b>late</b>", 4, 60, 100)]
    request = RequestRecord(100.0, 100.0, 110.4, 5, 100, events, spans, finish="length", step=1)
    update = UpdateRecord("<b>late</b>", 103.0, 104.0, 104.1, epoch=4, pause_seconds=0.02)
    scrapes = [ScrapeRecord(100.0 + n, {"running": 1.0, "waiting": 0.0, "kv_usage": 0.1}) for n in range(10)]
    asked = {"profile": "rollout", "label": None, "url": "http://127.0.0.1:9", "slos": (), **options}
    return RunRecords(asked, 100.0, 111.0, [request], [update], [StepRecord(1, 100.0, 110.4)], scrapes)


def write(folder: Path, **options: object) -> tuple[int, str]:
    seen = io.StringIO()
    code = report.write(made_up(**options), folder, Console(file=seen, width=200))
    return code, seen.getvalue()


def test_both_files_are_written_and_say_the_same(tmp_path: Path) -> None:
    code, seen = write(tmp_path / "new", slos=("ttft_p99<0.6", "tokens_per_s>5"))
    assert code == 0
    loaded = json.loads((tmp_path / "new" / "report.json").read_text())
    assert loaded["measured"]["tokens"] == 100
    assert [verdict["kept"] for verdict in loaded["slos"]] == [True, True]
    assert loaded["provenance"]["versions"]["locust"]
    assert "ttft_p99<0.6" in seen
    html = (tmp_path / "new" / "report.html").read_text()
    assert "ttft_p99&lt;0.6" in html
    assert "<b>late</b>" not in html


def test_exit_codes(tmp_path: Path) -> None:
    code, seen = write(tmp_path, slos=("ttft_p99<0.1",))
    assert code == report.BROKEN_SLO
    assert "broken" in seen
    late = made_up()
    late.requests[0].scheduled -= 1
    assert report.write(late, None, Console(file=io.StringIO())) == report.INVALID


def busy() -> RunRecords:
    """A run with numbers of many digits."""
    run = made_up(slos=("ttft_p99<0.1",))
    run.updates[0].version = "checkpoint-1234567890"
    run.updates.append(
        UpdateRecord("b", 105.0, 105.1, 105.2, error="internal", said="[no] room for 123456789 bytes")
    )
    run.requests += [
        RequestRecord(100.0, 100.0, 101.0, error="http-400", said="found [987654]") for _ in range(1234)
    ]
    return run


def shown(width: int) -> str:
    seen = io.StringIO()
    report.write(busy(), None, Console(file=seen, width=width))
    return seen.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_digit_is_lost_in_a_narrow_terminal(width: int) -> None:
    narrow, wide = shown(width), shown(1000)
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= width
    assert sorted(filter(str.isdigit, narrow)) == sorted(filter(str.isdigit, wide))


def test_tables_are_as_wide_as_they_need_to_be_where_nobody_has_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    report.write(busy(), None)
    seen = capsys.readouterr().out
    assert any("checkpoint-1234567890" in line and "internal" not in line for line in seen.splitlines())
    assert "1234 of 1235 requests failed with http-400: found [987654]" in seen
    assert "failed with internal: [no] room for 123456789 bytes" in seen
    assert max(map(len, seen.splitlines())) < 200


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    write(tmp_path / "a", label="stock")
    write(tmp_path / "b", label="ours")
    whole = page([json.loads((tmp_path / name / "report.json").read_text()) for name in "ab"])
    assert whole.count("over time</h2>") == 2
    assert "<th>stock</th><th>ours</th>" in whole


def test_the_page_names_no_other_host(tmp_path: Path) -> None:
    write(tmp_path)
    html = (tmp_path / "report.html").read_text()
    markup = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", markup)
    assert not re.findall(r"<script[^>]+src=", html)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


LISTEN = """<script>
const problems = [];
addEventListener("error", (event) => problems.push(String(event.message || event.target.src)), true);
const told = console.error;
console.error = (...all) => { problems.push(all.join(" ")); told(...all); };
addEventListener("load", () => setTimeout(() => {
  const asked = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.documentElement.setAttribute("data-found", btoa(JSON.stringify({ problems, asked })));
}, 1500));
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (apt-get install chromium)")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    """Drawn by the page's own script, without an error on the console, and without a request to anywhere."""
    write(tmp_path)
    html = (tmp_path / "report.html").read_text()
    (tmp_path / "watched.html").write_text(html.replace("<head>", f"<head>{LISTEN}", 1))
    line = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    line += ["--disable-background-networking", "--disable-component-update", "--disable-quic"]
    line += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [*line, f"file://{tmp_path / 'watched.html'}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert 'class="main-svg"' in done.stdout
    assert 'class="scatterlayer' in done.stdout
    match = re.search(r'data-found="([^"]+)"', done.stdout)
    assert match, "the page did not load to its end"
    assert json.loads(base64.b64decode(match[1])) == {"problems": [], "asked": []}
