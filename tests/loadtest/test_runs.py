# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the load generator, as its users start them, against a server that does nothing but send tokens."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.environment import ADMIN_KEY, API_KEY
from vllm_fp8ext.loadtest.command import LOCUSTFILE
from vllm_fp8ext.loadtest.weight_updates import Pusher

pytestmark = pytest.mark.timeout(1800)
INTERVAL = 0.02
LONGER = (1, 3, 9, 27)
"""How much longer than on a free machine a run may be, where too little came of a shorter one."""


class Trivial:
    """The server, in a process of its own."""

    def __init__(self, port: int, *program: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        program = program or ("-m", "vllm_fp8ext.loadtest.trivial_server")
        self._line = [sys.executable, *program, "--port", str(port), "--interval", str(INTERVAL)]
        self.start()

    def start(self) -> None:
        """Start it; returns once it answers."""
        self.process = subprocess.Popen(self._line)
        while self.process.poll() is None:
            try:
                httpx.get(f"{self.url}/version", trust_env=False)
                return
            except httpx.HTTPError:
                time.sleep(0.05)
        pytest.fail("the trivial server did not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def trivial(unused_port: int) -> Iterator[Trivial]:
    server = Trivial(unused_port)
    yield server
    server.stop()


@pytest.fixture
def crashing(unused_port: int) -> Iterator[Trivial]:
    server = Trivial(unused_port, str(Path(__file__).with_name("crashing_server.py")))
    yield server
    server.stop()


@pytest.fixture
def strict(unused_port: int) -> Iterator[Trivial]:
    server = Trivial(unused_port, str(Path(__file__).with_name("strict_server.py")))
    yield server
    server.stop()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def unused_port() -> int:
    return free_port()


def load(url: str, folder: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and output of `fp8ext bench load`."""
    line = [sys.executable, "-m", "vllm_fp8ext.cli", "bench", "load", "--url", url, "--report", str(folder)]
    done = subprocess.run([*line, *more], capture_output=True, text=True, timeout=900)
    report = folder / "report.json"
    return (
        done.returncode,
        json.loads(report.read_text()) if report.exists() else {},
        done.stdout + done.stderr,
    )


def load_until(
    enough: Callable[[dict[str, Any]], bool],
    server: Trivial,
    folder: Path,
    seconds: int,
    *more: str,
    prepare: Callable[[], object] = lambda: None,
) -> tuple[int, dict[str, Any], str]:
    """As `load`, for so many seconds; for more where other work had the machine until there was not `enough` measured.

    `prepare` is called before each run, which has a server that has just started.
    """
    for factor in LONGER:
        if factor > LONGER[0]:
            server.stop()
            server.start()
            shutil.rmtree(folder, ignore_errors=True)
        prepare()
        start = time.monotonic()
        code, report, said = load(server.url, folder, "--time", f"{factor * seconds}s", *more)
        assert time.monotonic() - start < factor * seconds + 300
        if report and enough(report["measured"]):
            break
    assert report, said
    return code, report, said


def well_answered(measured: dict[str, Any]) -> int:
    """Requests that were answered to the end."""
    count: int = measured["requests"] - measured["unfinished_requests"] - measured["failed_requests"]
    return count


def test_a_closed_loop_past_a_proxy(
    trivial: Trivial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("ALL_PROXY", "socks5://nowhere:1")
    lengths = ("--input-tokens", "uniform:3,9", "--output-tokens", "10")
    code, report, said = load_until(
        lambda measured: well_answered(measured) >= 8,
        *(trivial, tmp_path, 3, "--users", "4", *lengths, "--slo", "failed_requests<=0"),
    )
    assert code in (0, 2), said  # a busy machine may hold up the generator, which then says so
    measured = report["measured"]
    good = well_answered(measured)
    assert good >= 8
    assert measured["itl"]["count"] >= good * 9
    assert measured["ttft"]["p50"] >= INTERVAL
    assert measured["e2e"]["p50"] >= 10 * INTERVAL
    assert measured["unfinished_requests"] <= 4
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    assert "output tok/s" in said


def test_an_open_loop_of_several_processes_keeps_its_timetable(trivial: Trivial, tmp_path: Path) -> None:
    code, report, said = load_until(
        lambda measured: measured["requests"] > 0,
        *(trivial, tmp_path, 6, "--profile", "constant", "--rate", "20", "--users", "2", "--processes", "2"),
        *("--input-tokens", "5", "--output-tokens", "5", "--endpoint", "chat"),
    )
    assert code in (0, 2), said
    measured = report["measured"]
    assert measured["requests"] <= 22 * measured["seconds"] + 2
    assert code == 2 or 16 <= measured["achieved_rate"] <= 22, measured["seconds"]
    assert measured["failed_requests"] == 0
    assert measured["schedule_delay"]["count"] == measured["requests"]
    assert (code == 2) == bool(measured["invalid"])


@pytest.mark.full
def test_what_the_end_cuts_off_is_told_by_every_process(trivial: Trivial, tmp_path: Path) -> None:
    """With `--time` locust itself ends the others only after the report."""
    code, report, said = load_until(
        lambda measured: measured["requests"] == 4 and measured["tokens"] > 100,
        *(trivial, tmp_path, 4, "--users", "4", "--processes", "2"),
        *("--input-tokens", "5", "--output-tokens", "50000"),
    )
    assert code == 2, said
    measured = report["measured"]
    assert (measured["requests"], measured["unfinished_requests"]) == (4, 4)
    assert measured["tokens"] > 100
    assert measured["e2e"]["max"] <= measured["seconds"]


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_no_step_begins_after_the_end(trivial: Trivial, tmp_path: Path, processes: int) -> None:
    code, report, said = load_until(
        lambda measured: measured["steps"].get("count", 0) >= 1,
        *(trivial, tmp_path, 5, "--profile", "rollout", "--prompts", "2", "--samples", "1"),
        *("--input-tokens", "5", "--output-tokens", "60", f"--processes={processes}"),
    )
    assert code in (0, 2), said
    measured = report["measured"]
    assert measured["steps"]["count"] >= 1
    assert measured["requests"] <= 2 * (measured["steps"]["count"] + 1)
    assert measured["e2e"]["max"] <= measured["seconds"]


def test_a_server_that_dies_in_mid_run(crashing: Trivial, tmp_path: Path) -> None:
    def died(measured: dict[str, Any]) -> bool:
        errors = measured["errors"]
        return "truncated" in errors and "connect" in errors and measured["e2e"].get("count", 0) >= 1

    code, report, said = load_until(
        died,
        *(crashing, tmp_path, 7, "--users", "3", "--input-tokens", "5", "--output-tokens", "30"),
        *("--slo", "failed_requests<=0"),
    )
    assert code in (1, 2), said
    errors = report["measured"]["errors"]
    assert errors["truncated"] >= 1
    assert errors["connect"] >= 1
    assert report["measured"]["e2e"]["count"] >= 1


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_rollout_steps_end_by_themselves(trivial: Trivial, tmp_path: Path, processes: int) -> None:
    most = 300
    code, report, said = load(
        *(trivial.url, tmp_path, "--profile", "rollout", "--rollout-steps", "3", "--prompts", "2"),
        *("--samples", "3", "--input-tokens", "5", "--output-tokens", "uniform:3,20", "--time", f"{most}s"),
        *(("--processes", str(processes)) if processes > 1 else ()),
    )
    assert code in (0, 2), said
    measured = report["measured"]
    assert measured["steps"]["count"] == 3
    assert measured["requests"] == measured["e2e"]["count"] == 18
    assert measured["schedule_delay"]["count"] == 18
    assert 0 < measured["steps"]["straggler_share"] < 1
    assert measured["seconds"] < most / 2


def refused(url: str, folder: Path, *more: str) -> str:
    """The line of a run that is refused before any user starts."""
    start = time.monotonic()
    code, report, said = load(url, folder, "--time", "600s", *more)
    assert (code, report) == (2, {}), said
    assert time.monotonic() - start < 500
    assert "Traceback" not in said
    assert "ERROR/locust" not in said
    assert "users spawned" not in said
    assert "Type     Name" not in said, "locust's own tables, of nothing"
    [line] = re.findall("^fp8ext: .*", said, re.MULTILINE)
    return line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(("--slo", "foo<1"), "SLO: expected NAME<VALUE", marks=pytest.mark.full),
        (("--slo", "ttft<1", "--processes", "2"), "found 'ttft<1'"),
        pytest.param(("--input-tokens", "many"), "lengths: expected", marks=pytest.mark.full),
        pytest.param(
            ("--vocabulary", "5"),
            "vocabulary: expected more than 10 token ids, found 5",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("--update-every", "5"),
            "expected at least one for --update-every 5, found none",
            marks=pytest.mark.full,
        ),
    ],
)
def test_options_that_are_wrong_are_refused(
    trivial: Trivial, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    assert message in refused(trivial.url, tmp_path, *more)


@pytest.mark.parametrize("more", [(), pytest.param(("--model", "trivial"), marks=pytest.mark.full)])
def test_nobody_there(unused_port: int, tmp_path: Path, more: tuple[str, ...]) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    line = refused(url, tmp_path, *more)
    assert f"expected a server at {url}, found none: " in line
    assert "Connection refused" in line


@pytest.mark.parametrize(
    ("key", "more", "message"),
    [
        pytest.param(None, (), "FP8EXT_ADMIN_KEY is not set", marks=pytest.mark.full),
        pytest.param("wrong", (), "the admin key is wrong", marks=pytest.mark.full),
        ("right", ("--checkpoints", "nosuch"), "found no *.safetensors in /"),
        pytest.param(
            "schlüssel",
            (),
            "FP8EXT_ADMIN_KEY: expected a key of printable ASCII characters",
            marks=pytest.mark.full,
        ),
    ],
)
def test_updates_that_can_not_be_made_are_refused_before_any_load(
    strict: Trivial,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    more: tuple[str, ...],
    message: str,
) -> None:
    if key is None:
        monkeypatch.delenv(ADMIN_KEY, raising=False)
    else:
        monkeypatch.setenv(ADMIN_KEY, key)
    line = refused(strict.url, tmp_path, "--update-every", "1", "--checkpoints", str(EARLY), *more)
    assert line.startswith(("fp8ext: --update-every: ", f"fp8ext: {ADMIN_KEY}: "))
    assert message in line


@pytest.mark.full
def test_a_key_of_the_model_routes_that_nobody_could_send_is_refused(
    trivial: Trivial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "schlüssel")
    assert f"{API_KEY}: expected a key of printable ASCII characters" in refused(trivial.url, tmp_path)


SMALL = ("--users", "1", "--input-tokens", "5", "--output-tokens", "5")


def test_updates_that_fail_later_are_counted_and_shown(
    strict: Trivial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY, "right")
    code, report, said = load_until(
        lambda measured: measured["failed_updates"] >= 1 and well_answered(measured) > 0,
        *(strict, tmp_path / "report", 8, *SMALL, "--vocabulary", "100", "--update-every", "1"),
        *("--checkpoints", str(EARLY), "--slo", "failed_updates<=0"),
    )
    assert code in (1, 2), said
    measured = report["measured"]
    ended = [update for update in measured["updates"] if update["error"] != "unfinished"]
    assert measured["failed_updates"] == len(ended) >= max(1, len(measured["updates"]) - 1)
    assert {(update["error"], update["said"]) for update in ended} == {("internal", "no room for [weights]")}
    assert "updates failed with internal: no room for [weights]" in said
    assert "failed_updates<=0: " in said
    assert "broken" in said


@pytest.fixture
def fleeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a checkpoint is to be when a run begins, and is no more once a server of that test answers."""
    folder = tmp_path / "fleeting"
    monkeypatch.setenv("FORGET", str(folder))
    return folder


@pytest.mark.full
def test_any_error_of_an_update_is_a_failed_update(
    fleeting: Path, strict: Trivial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY, "right")
    code, report, said = load_until(
        lambda measured: measured["failed_updates"] >= 2,
        *(strict, tmp_path / "report", 8, *SMALL, "--vocabulary", "100", "--update-every", "1"),
        *("--checkpoints", str(fleeting), "--slo", "failed_updates<=0"),
        prepare=lambda: shutil.copytree(EARLY, fleeting, dirs_exist_ok=True),
    )
    assert code in (1, 2), said
    assert report["measured"]["failed_updates"] >= 2
    assert "updates failed with ValueError: " in said
    assert "Traceback" not in said


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of that test does not answer to an update that is opened."""
    monkeypatch.setenv("HOLD", "1")


@pytest.mark.full
def test_an_update_that_the_end_of_a_run_cuts_off_is_not_a_failed_one(
    holding: None, strict: Trivial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY, "right")
    _, report, said = load_until(
        lambda measured: bool(measured["updates"]),
        *(strict, tmp_path / "report", 6, *SMALL, "--vocabulary", "100", "--update-every", "1"),
        *("--checkpoints", str(EARLY), "--slo", "failed_updates<=0"),
    )
    measured = report["measured"]
    [update] = measured["updates"]
    assert (update["version"], update["error"]) == ("update-1", "unfinished")
    assert measured["failed_updates"] == 0
    assert "the run ended during an update, which was given up" in said
    assert "broken" not in said


def test_an_update_whose_process_ends_is_a_failed_update(strict: Trivial) -> None:
    options = {"through": "fp8ext", "url": strict.url, "key": "right", "running": "keep", "files": False}
    pusher = Pusher({**options, "checkpoints": [str(EARLY)]})
    pusher.close()
    for number in (1, 2):
        update = pusher.push(step=number)
        assert (update.version, update.step) == (f"update-{number}", number)
        assert update.error
        assert update.began <= update.commit_sent <= update.committed


def test_a_process_that_has_refused_says_no_more_when_it_is_told_to_end() -> None:
    """As late as that may come: while its interpreter shuts down."""
    late = "atexit.register(os.kill, os.getpid(), signal.SIGTERM)"
    code = f"import atexit, os, signal; from vllm_fp8ext.loadtest import weight_updates; {late}; weight_updates.main()"
    options = {
        "through": "fp8ext",
        "url": "http://127.0.0.1:9",
        "key": "right",
        "running": "keep",
        "files": False,
    }
    asked = json.dumps({**options, "checkpoints": ["nosuch"]})
    done = subprocess.run(
        [sys.executable, "-c", code], input=asked, capture_output=True, text=True, timeout=600
    )
    assert "--update-every: " in json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
def test_a_run_in_which_nothing_succeeds_is_invalid_and_says_why(strict: Trivial, tmp_path: Path) -> None:
    code, report, said = load_until(
        lambda measured: measured["failed_requests"] > 0, strict, tmp_path, 5, "--users", "2"
    )
    assert code == 2, said
    measured = report["measured"]
    error = measured["most_frequent_error"]
    assert (error["kind"], error["status"]) == ("http-400", 400)
    assert 0 < error["count"] == measured["failed_requests"]
    assert measured["requests"] - measured["failed_requests"] == measured["unfinished_requests"] <= 2
    assert re.fullmatch(r"Token id \d+ is out of vocabulary", error["text"])
    assert any("no request succeeded" in reason for reason in measured["invalid"])
    assert f"failed with http-400: {error['text']}" in said
    assert "below --vocabulary, which is 1000: set --vocabulary to the size of the model's vocabulary" in said
    assert "out of vocabulary" in (tmp_path / "report.html").read_text()


def test_a_page_sends_keys_and_reports_nowhere_else(trivial: Trivial, tmp_path: Path) -> None:
    """Anybody who reaches it may ask for another server."""
    heard: list[str] = []
    handler = type("Heard", (BaseHTTPRequestHandler,), {"do_GET": lambda asked: heard.append(asked.path)})
    port = free_port()
    page = f"http://127.0.0.1:{port}"
    line = [sys.executable, "-m", "vllm_fp8ext.cli", "bench", "load", "--url", trivial.url, "--web"]
    line += ["--web-port", str(port), "--report", str(tmp_path / "told")]
    with (
        HTTPServer(("127.0.0.1", 0), handler) as elsewhere,
        subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
    ):
        threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
        try:
            await_page(page)
            told = {"host": trivial.url, "report": str(tmp_path / "told")}
            there = {"host": f"http://127.0.0.1:{elsewhere.server_port}", "report": str(tmp_path / "else")}
            for name, value in there.items():
                swarm(page, **{**told, name: value})
                (said,) = exceptions(page)
                assert f"{name}: expected that of the command line, {told[name]}, found {value}" in said
                httpx.get(f"{page}/stats/reset")
            swarm(page, **told)
            while not answered(trivial.url):
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGTERM)
            elsewhere.shutdown()
    assert not heard
    assert not (tmp_path / "else").exists()


def await_page(page: str) -> None:
    until = time.monotonic() + 600
    while time.monotonic() < until:
        try:
            httpx.get(page)
            return
        except httpx.HTTPError:
            time.sleep(0.1)
    pytest.fail("no page came")


def swarm(page: str, **more: str) -> None:
    httpx.post(f"{page}/swarm", data={"user_count": "1", "spawn_rate": "1", **more}, timeout=600)


def exceptions(page: str) -> list[str]:
    collected: list[dict[str, str]] = []
    while not collected:
        time.sleep(0.05)
        collected = httpx.get(f"{page}/exceptions").json()["exceptions"]
    return [exception["msg"] for exception in collected]


def answered(url: str) -> bool:
    return not httpx.get(f"{url}/metrics").text.endswith(" 0\n")


def locust(url: str, *more: str) -> subprocess.CompletedProcess[str]:
    """A run that locust itself is told of."""
    line = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(LOCUSTFILE),
        "--host",
        url,
        "--headless",
        "--users",
        "1",
    ]
    return subprocess.run([*line, *more], capture_output=True, text=True, timeout=900)


@pytest.mark.full
def test_locust_alone_takes_the_file(trivial: Trivial) -> None:
    for seconds in (5, 30, 120):  # on a busy machine nothing may come in the first few
        done = locust(trivial.url, "--run-time", f"{seconds}s", "--output-tokens", "5")
        assert done.returncode in (0, 2), done.stderr
        if done.stdout:
            break
    assert "time to first token" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("traffic", ["rollout", "poisson"])
def test_every_process_needs_a_user(trivial: Trivial, traffic: str) -> None:
    """Where one user of each sends; else a part of what is to be sent would wait for ever."""
    done = locust(trivial.url, "--processes", "2", "--traffic", traffic, "--rate", "5", "--run-time", "600s")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "users: expected one for each of 2 processes, found 1" in done.stderr
