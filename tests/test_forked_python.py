# SPDX-License-Identifier: Apache-2.0
"""Programs that are forked instead of executed: what they are given, and what tests see of them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python.processes import Popen, run

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="programs are executed where there is a GPU"
)

TELL = """
import json, os, sys
print(json.dumps({
    "arguments": sys.argv, "variable": os.environ.get("FP8EXT_TOLD"), "folder": os.getcwd(), "path": sys.path[0],
    "parent": os.getppid(), "session": os.getsid(0), "pid": os.getpid(), "vllm": "vllm" in sys.modules,
    "main": sys.modules["__main__"].__dict__ is globals(), "open": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
}))
"""


def told(line: list[str], **options: Any) -> dict[str, Any]:
    """What a program says of itself."""
    done = run([sys.executable, "-P", *line], stdout=subprocess.PIPE, text=True, timeout=300, **options)
    assert done.returncode == 0
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.mark.parametrize("kind", ["-c", "script", "-m"])
def test_a_program_is_what_it_would_be_if_it_was_executed(kind: str, tmp_path: Path) -> None:
    (tmp_path / "teller.py").write_text(TELL)
    line = {"-c": ["-c", TELL], "script": [str(tmp_path / "teller.py")], "-m": ["-m", "teller"]}[kind]
    environment = {
        **os.environ,
        "FP8EXT_TOLD": "yes",
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    }
    facts = told([*line, "one", "two"], env=environment, cwd=tmp_path)
    assert facts["arguments"] == ["-c" if kind == "-c" else str(tmp_path / "teller.py"), "one", "two"]
    assert (facts["variable"], facts["folder"], facts["path"]) == ("yes", str(tmp_path), str(tmp_path))
    assert (facts["parent"], facts["session"]) == (os.getpid(), os.getsid(0))
    assert (facts["vllm"], facts["main"], facts["open"]) == (True, True, [0, 1, 2])


def test_a_program_of_a_session_of_its_own_leads_it() -> None:
    facts = told(["-c", TELL], start_new_session=True)
    assert facts["session"] == facts["pid"]


def test_its_input_and_its_exit_code_are_passed_on() -> None:
    done = run(
        [sys.executable, "-P", "-c", "import sys; print(input(), file=sys.stderr); sys.exit(7)"],
        input="a line",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "a line\n")


def test_a_signal_before_its_first_line_ends_it() -> None:
    """`terminate` may come while it is still being forked."""
    with Popen([sys.executable, "-P", "-c", "import time; time.sleep(300)"]) as process:
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def test_what_it_spawns_is_forked_and_is_its_child(tmp_path: Path) -> None:
    program = tmp_path / "spawner.py"
    program.write_text("""
import json, multiprocessing, os, sys

def tell(pipe):
    pipe.send([os.getppid(), "vllm" in sys.modules, multiprocessing.current_process().name])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=tell, args=(its,), name="spawned")
    process.start()
    answer = ours.recv()
    process.join()
    print(json.dumps({"own": os.getpid(), "its": answer, "code": process.exitcode}))
""")
    facts = told([str(program)])
    assert facts["its"] == [facts["own"], True, "spawned"]
    assert facts["code"] == 0


def test_what_a_program_spawns_in_another_session_joins_it(tmp_path: Path) -> None:
    """It is executed: a process that is forked elsewhere could not join."""
    program = tmp_path / "leader.py"
    program.write_text("""
import json, multiprocessing, os, sys

def tell(pipe):
    pipe.send([os.getppid(), os.getsid(0)])

if __name__ == "__main__":
    os.setsid()
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=tell, args=(its,))
    process.start()
    answer = ours.recv()
    process.join()
    print(json.dumps({"own": os.getpid(), "its": answer}))
""")
    facts = told([str(program)])
    assert facts["its"] == [facts["own"], facts["own"]]


def test_variables_that_are_read_before_a_program_begins_make_it_executed() -> None:
    assert not told(["-c", TELL], env={**os.environ, "PYTHONHASHSEED": "7"})["vllm"]


def test_random_numbers_are_not_those_of_another_program() -> None:
    line = ["-c", "import json, numpy; print(json.dumps({'number': numpy.random.random()}))"]
    assert told(line) != told(line)


def test_metrics_of_a_program_are_shared_where_it_is_one_of_several(tmp_path: Path) -> None:
    """As prometheus_client decides it when it is imported."""
    line = [
        "-c",
        "import json, prometheus_client.values as v; print(json.dumps({'name': v.ValueClass.__name__}))",
    ]
    shared = told(line, env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})
    assert (shared["name"], told(line)["name"]) == ("MmapedValue", "MutexValue")
