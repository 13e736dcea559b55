# SPDX-License-Identifier: Apache-2.0
"""With which code a server ends, by how its engine did."""

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, os, signal, sys, zmq
from types import SimpleNamespace
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_fp8ext.compat.engine_client import EngineCalls

def end(how):
    if how.startswith("killed"):
        number = getattr(signal, how.split()[1])
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(int(how.split()[1]))

if __name__ == "__main__":
    told, how = sys.argv[1] == "told", sys.argv[2]
    engine = multiprocessing.get_context("fork").Process(target=end, args=(how,))
    engine.start()
    resources = BackgroundResources(ctx=None)
    resources.engine_manager = SimpleNamespace(processes=[engine])
    calls = EngineCalls(SimpleNamespace(engine_core=SimpleNamespace(resources=resources)), 1.0)
    resources.validate_alive([zmq.Frame(b"output"), zmq.Frame(b"of a step")])
    if told:
        try:
            resources.validate_alive([zmq.Frame(b"ENGINE_CORE_DEAD")])
        except EngineDeadError:
            pass
    engine.join()
    calls.require_clean_end()
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("told", "how", "code"),
    [
        ("untold", "code 0", 0),
        ("untold", "killed SIGTERM", 0),
        ("untold", "killed SIGINT", 0),
        ("untold", "code 1", 70),
        ("untold", "killed SIGKILL", 70),
        ("told", "code 1", 70),
        # vLLM's server stops an engine that is about to end by itself
        ("told", "killed SIGTERM", 70),
    ],
)
def test_a_server_ends_as_its_engine_did(tmp_path, told: str, how: str, code: int) -> None:
    script = tmp_path / "server.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-P", str(script), told, how], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == code, done.stderr[-2000:]
