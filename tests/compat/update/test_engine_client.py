# SPDX-License-Identifier: Apache-2.0
"""With which code a server ends, by how its engine did; and when it ends its engine."""

import asyncio
import contextlib
import json
import queue
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from engine_answers import engine_status, update_state
from forked_python.processes import run

from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.serve.work import outcome
from vllm_fp8ext.update.contract.operations import Operation
from vllm_fp8ext.update.contract.results import Done, JobStarted, Progress

PULSE = "pulse"

SCRIPT = """
import json, multiprocessing.connection, os, signal, sys, time, zmq
from types import SimpleNamespace
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_fp8ext.compat.update import engine_shutdown

def end(how):
    if how.startswith("stopped"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    if how.startswith("ending"):
        os.closerange(3, 1000)
        time.sleep(0.5)
        os._exit(int(how.split()[1]))
    if how == "hanging":
        os.closerange(3, 1000)
        time.sleep(60)
    if how.startswith("killed"):
        number = getattr(signal, how.split()[1])
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(int(how.split()[1]))

def serve(told, how):
    engine = multiprocessing.get_context("fork").Process(target=end, args=(how,))
    engine.start()
    resources = BackgroundResources(ctx=None)
    resources.engine_manager = SimpleNamespace(processes=[engine], shutdown=engine.kill)
    noted = engine_shutdown.EngineEnd(resources)
    resources.validate_alive([zmq.Frame(b"output"), zmq.Frame(b"of a step")])
    if told == "told":
        try:
            resources.validate_alive([zmq.Frame(b"ENGINE_CORE_DEAD")])
        except EngineDeadError:
            pass
    if how == "stopped":
        time.sleep(0.1)
        resources.engine_manager.shutdown()
    if how == "hanging":
        engine_shutdown._END_SECONDS = 0.5
    if how.startswith("ending") or how == "hanging":
        multiprocessing.connection.wait([engine.sentinel])
        resources.engine_manager.shutdown()
    engine.join()
    if how == "killed SIGKILL":
        resources.engine_manager.shutdown()
    noted.require_clean()

codes = []
for case in json.loads(sys.argv[1]):
    server = os.fork()
    if server == 0:
        try:
            serve(*case)
            os._exit(0)
        finally:
            os._exit(1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]))
print(json.dumps(codes))
"""
CASES = {
    ("untold", "code 0"): 0,
    ("untold", "killed SIGTERM"): 0,
    ("untold", "killed SIGINT"): 0,
    ("untold", "code 1"): 70,
    ("untold", "killed SIGKILL"): 70,
    ("told", "code 1"): 70,
    ("told", "stopped"): 70,
    # vLLM's server sees the end of its engine, and stops it, before the engine has a code
    ("untold", "ending 70"): 70,
    # it began to end, and has no code for seconds
    ("untold", "hanging"): 70,
    # it takes longer to end than vLLM's server waits
    ("untold", "stopped"): 0,
    # vLLM's server stops an engine that is about to end by itself
    ("told", "killed SIGTERM"): 70,
}


@pytest.fixture(scope="module")
def codes() -> dict[tuple[str, str], int]:
    """By case; each a process of its own, forked from one that has vLLM imported."""
    line = [sys.executable, "-P", "-c", SCRIPT, json.dumps(list(CASES))]
    done = run(line, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_server_ends_as_its_engine_did(codes: dict[tuple[str, str], int], case: tuple[str, str]) -> None:
    assert codes[case] == CASES[case]


def test_a_job_is_not_asked_about_before_it_can_have_ended() -> None:
    """Each poll costs the requests beside it something."""
    from vllm_fp8ext.compat.update.engine_client import EngineCalls

    class Calls(EngineCalls):
        def __init__(self) -> None:
            self._deadline = 60.0
            self.asked: list[float] = []

        async def __call__(self, operation: str, **arguments: Any) -> Any:
            if operation == "stage":
                return JobStarted(job=7, soonest=0.25)
            assert (operation, arguments) == ("poll", {"job": 7})
            self.asked.append(time.monotonic())
            return Done()

    calls, start = Calls(), time.monotonic()
    assert asyncio.run(calls.job(Operation.STAGE)) == Done()
    assert len(calls.asked) == 1
    assert calls.asked[0] - start >= 0.25


def test_the_next_step_of_a_job_is_asked_about_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of an update of a small model is shorter than the shortest pause between two polls."""
    from vllm_fp8ext.compat.update import engine_client

    script = [Progress(step=1), Progress(step=1, tensors=3), Progress(step=2), Progress(step=2), Done()]
    pauses: list[bool] = []

    class Calls(engine_client.EngineCalls):
        def __init__(self) -> None:
            self._deadline = 60.0

        async def __call__(self, operation: str, **arguments: Any) -> Any:
            return JobStarted(job=7) if operation == "prepare" else script.pop(0)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds > 0)

    monkeypatch.setattr(engine_client, "asyncio", SimpleNamespace(sleep=sleep))
    assert asyncio.run(Calls().job(Operation.PREPARE)) == Done()
    assert pauses == [False, True, True, False, True], "before the first poll, and after each"


@pytest.mark.parametrize("operation", [Operation.UPDATE, Operation.STATUS, Operation.WITHDRAW])
def test_each_answer_tells_whether_the_engine_is_poisoned(operation: Operation) -> None:
    """An update may end half-way while the engine is asked for something else."""
    from vllm_fp8ext.compat.update import engine_core
    from vllm_fp8ext.compat.update.engine_client import EngineCalls

    committer = SimpleNamespace(poisoned=None)
    answers: dict[str, Any] = {
        "update": update_state(),
        "status": engine_status(epoch=3),
        "withdraw": Failure(kind="unknown-update", message="no update u", status=404),
    }

    def handle(asked: str, arguments: dict[str, Any]) -> Any:
        committer.poisoned = "update u ended half-way, in place"
        return answers[asked]

    core = SimpleNamespace(
        fp8ext_engine=SimpleNamespace(handle=handle, committer=committer),
        fp8ext_watchdog=SimpleNamespace(watching=lambda operation: contextlib.nullcontext()),
        fp8ext_changes=SimpleNamespace(tell=lambda: None),
    )

    async def utility(method: str, asked: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return engine_core.call(core, asked, arguments)

    resources = SimpleNamespace(engine_dead=False)
    client = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=utility, resources=resources))
    heard: list[str | None] = []
    calls = object.__new__(EngineCalls)
    end = SimpleNamespace(engine_ended=lambda: False)
    vars(calls).update(_client=client, _core=client.engine_core, end=end, _deadline=60.0, _heard=heard.append)
    result = asyncio.run(outcome(calls(operation)))
    assert heard == ["update u ended half-way, in place"]
    if operation is Operation.WITHDRAW:
        assert isinstance(result, UpdateError)
        assert result.kind == "unknown-update"
    else:
        assert result == answers[operation]


class Core:
    """An engine that answers nothing, but runs, or does not."""

    def __init__(self, *, runs: bool) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.runs = runs
        self.asked: list[str] = []

    async def call_utility_async(self, method: str, operation: str, arguments: dict[str, Any]) -> None:
        assert method == "fp8ext"
        self.asked.append(operation)
        if operation != PULSE or not self.runs:
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("operation", "runs", "asked", "ended"),
    [
        (Operation.COMMIT, False, ["commit", PULSE], True),
        (Operation.COMMIT, True, ["commit", PULSE], False),
        # of no update: nobody waits for it
        (Operation.STATUS, False, ["status"], False),
    ],
)
def test_an_engine_is_ended_that_does_not_run_while_a_call_of_an_update_is_past_its_deadline(
    operation: Operation, runs: bool, asked: list[str], ended: bool
) -> None:
    """However long a step takes, the engine's thread for input answers."""
    from vllm_fp8ext.compat.update.engine_client import EngineCalls

    core, reasons = Core(runs=runs), list[str]()

    class Calls(EngineCalls):
        def __init__(self) -> None:
            self._core, self._deadline = core, 2.0
            self.end: Any = SimpleNamespace(kill=reasons.append, engine_ended=lambda: False)

    with pytest.raises(UpdateError, match=f"did not answer {operation} within 2 s") as refusal:
        asyncio.run(Calls()(operation))
    assert (refusal.value.kind, refusal.value.status) == ("engine-timeout", 504)
    assert core.asked == asked
    assert reasons == [f"the engine did not answer {operation} within 2 s, nor did it run at all"] * ended


def test_an_input_thread_answers_for_its_engine() -> None:
    """And hands on everything else, as it came."""
    from vllm.v1.engine import EngineCoreRequestType

    from vllm_fp8ext.compat.update.heartbeat import answer_pulse

    core = SimpleNamespace(input_queue=queue.Queue(), output_queue=queue.Queue())
    answer_pulse(core)
    utility, add = EngineCoreRequestType.UTILITY, EngineCoreRequestType.ADD
    others = [
        (add, ("request", 0)),
        (utility, [3, 8, "fp8ext", ["status", {}]]),
        (utility, [3, 9, "sleep", [1, "abort"]]),
        (utility, [3, 9, "reset_mm_cache", []]),
    ]
    core.input_queue.put_nowait((utility, [3, 7, "fp8ext", [PULSE, {}]]))
    for item in others:
        core.input_queue.put_nowait(item)
    assert [core.input_queue.get_nowait() for _ in others] == others
    assert core.input_queue.empty()
    client, outputs = core.output_queue.get_nowait()
    assert (client, outputs.utility_output.call_id) == (3, 7)
    assert outputs.utility_output.failure_message is None
    assert core.output_queue.empty()
