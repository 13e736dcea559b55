# SPDX-License-Identifier: Apache-2.0
"""One engine core of several: how it is stopped, what others ask of it meanwhile, and how ranks that step together meet."""

import multiprocessing
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc

from vllm_fp8ext.compat.update import core_member, member_channel
from vllm_fp8ext.compat.update.core_member import CoreMember
from vllm_fp8ext.compat.update.core_thread import CoreThread
from vllm_fp8ext.compat.update.data_parallel import KEY, EngineCores, beyond_one_server, tell
from vllm_fp8ext.compat.update.member_channel import LocalMember, RemoteMember, listen
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.labels import Label
from vllm_fp8ext.update.engine.core_group import CoreFacts, CoreReply

ALL, NEW, ON = PauseState.PAUSED_ALL, PauseState.PAUSED_NEW, PauseState.UNPAUSED


class Scheduler:
    def __init__(self) -> None:
        self.pause_state = ON
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.kv_holding_waiting: list[str] = []
        self.requests: dict[str, Any] = {}

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def has_requests(self) -> bool:
        return bool(self.waiting)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting) and self.pause_state is ON

    def finish_requests(self, *_: Any) -> list[str]:
        return []


class Core(SimpleNamespace):
    """The parts of a core that a member touches; one of a mixture of experts passes for `DPEngineCoreProc`."""

    def __init__(self, *, in_step: bool) -> None:
        scheduler = Scheduler()
        super().__init__(
            scheduler=scheduler,
            add_request=lambda request: scheduler.waiting.append(request.request_id),
            model_executor=SimpleNamespace(is_sleeping=False, sleeping_tags=set()),
            output_queue=queue.Queue(),
            input_queue=queue.Queue(),
            engines_running=False,
            ignore_start_dp_wave=False,
            current_wave=7,
            batch_queue=None,
            errors=[],
            _send_error_outputs_to_client=lambda ids, client: self.errors.extend(ids),
            _handle_client_request=lambda kind, request: None,
        )
        self.in_step = in_step

    @property
    def woken(self) -> list[int]:
        """Waves that the other ranks were told of."""
        return [self.output_queue.get_nowait()[1].start_wave for _ in range(self.output_queue.qsize())]


def member_of(core: Core) -> CoreMember:
    """A member without what needs a model."""
    member = object.__new__(CoreMember)
    vars(member).update(
        _core=core,
        _wishes=[],
        _before=None,
        _stalled_until=None,
        _refusing=False,
        _refused=None,
        _in_step=core.in_step,
        _add_request=core.add_request,
        _set_pause_state=core.scheduler.set_pause_state,
        compiled=[],
        watchdog=SimpleNamespace(watching=lambda name: _Watched()),
    )
    return member


class _Watched:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


@pytest.fixture(params=[False, True], ids=["dense", "experts"])
def core(request: pytest.FixtureRequest) -> Core:
    return Core(in_step=request.param)


@pytest.fixture
def member(core: Core) -> CoreMember:
    return member_of(core)


def request(name: str) -> Any:
    return SimpleNamespace(request_id=name, client_index=0)


def test_only_what_vllm_calls_one_of_several_steps_together() -> None:
    assert issubclass(DPEngineCoreProc, core_member.DPEngineCoreProc)


def test_it_goes_on_as_it_was(core: Core, member: CoreMember) -> None:
    member.stop()
    member.stop()
    assert core.scheduler.pause_state is ALL
    member.resume()
    assert core.scheduler.pause_state is ON
    member.resume()
    assert "set_pause_state" not in vars(core.scheduler)


@pytest.mark.parametrize("stopped_by", ["stop", "admit_no_more"])
def test_what_others_ask_meanwhile_holds_afterwards(core: Core, member: CoreMember, stopped_by: str) -> None:
    getattr(member, stopped_by)()
    core.scheduler.set_pause_state(ALL)
    member.stop()
    core.scheduler.set_pause_state(NEW)
    assert core.scheduler.pause_state is ALL
    assert member.answer("look", ()).facts.interrupted
    member.resume()
    assert core.scheduler.pause_state is NEW
    assert not member.answer("look", ()).facts.interrupted


def test_one_that_others_had_paused_stays_paused(core: Core, member: CoreMember) -> None:
    core.scheduler.set_pause_state(NEW)
    assert member.answer("look", ()).facts.paused
    assert not member.answer("stop", ()).facts.paused
    member.resume()
    assert core.scheduler.pause_state is NEW


@pytest.mark.parametrize("stopped_by", ["stop", "admit_no_more"])
def test_a_request_that_must_wait_wakes_every_rank(core: Core, member: CoreMember, stopped_by: str) -> None:
    """They have been woken for it, and meet this one in their collectives."""
    getattr(member, stopped_by)()
    core.add_request(request("a"))
    assert core.scheduler.waiting == ["a"]
    assert (core.engines_running, core.woken) == ((True, [7]) if core.in_step else (False, []))
    core.add_request(request("b"))
    assert core.woken == []
    core.engines_running = False
    member.resume()
    assert (core.engines_running, core.woken) == ((True, [7]) if core.in_step else (False, []))
    core.engines_running = False
    core.add_request(request("c"))
    assert core.woken == [], "vLLM does that by itself"


def test_steps_in_flight_end_before_any_rank_can_exchange(core: Core, member: CoreMember) -> None:
    """Ranks of a mixture of experts swap when all have stopped: each token of a step goes through experts of others."""
    in_flight = [{0: "tokens of one"}, {0: "tokens of another"}]
    core.batch_queue = in_flight
    core.step_with_batch_queue = lambda: (in_flight.pop(0), True)
    core.post_step = lambda executed: None
    member.stop()
    assert len(in_flight) == (0 if core.in_step else 2)
    member.drain()
    assert [core.output_queue.get_nowait() for _ in range(2)] == [
        (0, "tokens of one"),
        (0, "tokens of another"),
    ]


def test_where_vllm_has_paused_all_ranks_nobody_is_woken(core: Core, member: CoreMember) -> None:
    core.ignore_start_dp_wave = True
    member.stop()
    core.add_request(request("a"))
    assert (core.engines_running, core.woken) == (False, [])


def test_a_request_that_is_refused_wakes_every_rank(core: Core, member: CoreMember) -> None:
    member.stop()
    member.refuse_requests()
    core.add_request(request("a"))
    assert core.errors == ["a"]
    assert core.woken == ([7] if core.in_step else [])
    core.engines_running = False
    member.stop()
    core.add_request(request("b"))
    assert core.errors == ["a", "b"]
    core.engines_running, _ = False, core.woken
    member.accept_requests()
    core.add_request(request("c"))
    assert core.scheduler.waiting == ["c"]
    assert core.woken == ([7] if core.in_step else [])


def test_one_that_refuses_requests_refuses_them_when_it_goes_on(core: Core, member: CoreMember) -> None:
    """After a commit that it does not become current by."""
    member.stop()
    member.refuse_requests()
    member.resume()
    core.add_request(request("a"))
    member.stop()
    core.add_request(request("b"))
    assert (core.errors, core.scheduler.waiting) == (["a", "b"], [])
    member.accept_requests()
    member.resume()
    core.add_request(request("c"))
    assert core.scheduler.waiting == ["c"]


def test_an_answer_tells_what_was_raised(member: CoreMember, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(label: Label) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(member, "relabel", fail)
    reply = member.answer("relabel", (Label(1, "a"),))
    assert isinstance(reply.error, UpdateError)
    assert str(reply.error) == "RuntimeError: no"
    reply = member.answer("end", ("no reason",))
    assert str(reply.error) == "expected a call of an engine core, found end"


# --- calls from other threads and processes


class Loop:
    """A core's main loop, on a thread."""

    def __init__(self, core: Core) -> None:
        self.thread = CoreThread(core)
        self.busy = threading.Lock()
        self._core = core
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            kind, call = self._core.input_queue.get()
            with self.busy:
                self._core._handle_client_request(kind, call)


class Echo:
    """In place of a `CoreMember`."""

    def answer(self, name: str, arguments: tuple[Any, ...]) -> CoreReply:
        return CoreReply(
            result=(name, *arguments, threading.current_thread().name),
            facts=CoreFacts(pid=1, paused=False, unfinished=0, asleep=False, interrupted=False),
        )


class EndedError(Exception):
    """In place of the end of the process."""


def end(reason: str) -> NoReturn:
    raise EndedError(reason)


@pytest.fixture
def loop() -> Loop:
    return Loop(Core(in_step=False))


Remote = Callable[..., RemoteMember]


@pytest.fixture
def remote(loop: Loop) -> Remote:
    """Connects with a core that listens in this process."""
    name = secrets.token_hex(8)
    listen(name, 1, loop.thread, Echo)  # type: ignore[arg-type]  # answers are all that is asked for

    def connect(seconds: float = 60.0) -> RemoteMember:
        return RemoteMember(name, 1, seconds, end)

    return connect


def test_calls_run_on_the_cores_own_thread(loop: Loop, remote: Remote) -> None:
    for member in (LocalMember(loop.thread, Echo), remote()):  # type: ignore[arg-type]
        member.send("stop", (1, 2))
        *echoed, thread = member.receive().result
        assert echoed == ["stop", 1, 2]
        assert thread != threading.current_thread().name


def test_other_wakeups_are_vllms(loop: Loop) -> None:
    passed = threading.Event()
    core = Core(in_step=False)
    core._handle_client_request = lambda kind, call: passed.set()
    CoreThread(core)
    core._handle_client_request(EngineCoreRequestType.WAKEUP, None)
    assert passed.is_set()


def test_a_long_step_is_waited_for(loop: Loop, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process answers pings meanwhile."""
    monkeypatch.setattr(member_channel, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(member_channel, "_PONG_SECONDS", 5.0)
    member = remote(0.02)
    with loop.busy:
        member.send("stop", ())
        threading.Timer(0.3, loop.busy.release).start()
        reply = member.receive()
        loop.busy.acquire()
    assert reply.result[0] == "stop"


def test_a_process_that_does_not_run_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_channel, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(member_channel, "_PONG_SECONDS", 0.1)
    name, key = secrets.token_hex(8), multiprocessing.current_process().authkey
    listener = member_channel.Listener(member_channel._address(name, 2), "AF_UNIX", authkey=key)
    accepted: list[Any] = []
    taking = threading.Thread(target=lambda: accepted.append(listener.accept()))
    taking.start()
    member = RemoteMember(name, 2, 0.1, end)
    taking.join()
    member.send("stop", ())
    with pytest.raises(EndedError, match="data-parallel rank 2 does not run at all"):
        member.receive()
    accepted[0].close()
    with pytest.raises(EndedError, match="data-parallel rank 2 has ended"):
        member.receive()
    listener.close()


def test_one_that_never_listens_ends_the_server() -> None:
    started = time.monotonic()
    with pytest.raises(EndedError, match="data-parallel rank 3 did not listen"):
        RemoteMember(secrets.token_hex(8), 3, 0.2, end)
    assert time.monotonic() - started < 30


def test_who_has_another_key_is_not_heard(remote: Remote, loop: Loop) -> None:
    member = remote()
    name = secrets.token_hex(8)
    listen(name, 1, loop.thread, Echo)  # type: ignore[arg-type]
    with pytest.raises((multiprocessing.AuthenticationError, EOFError)):
        member_channel.Client(member_channel._address(name, 1), "AF_UNIX", authkey=b"another")
    RemoteMember(name, 1, 60.0, end).send("stop", ())
    member.send("stop", ())
    assert member.receive().result[0] == "stop"


def test_who_says_nothing_holds_up_nobody(loop: Loop) -> None:
    name = secrets.token_hex(8)
    listen(name, 1, loop.thread, Echo)  # type: ignore[arg-type]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(member_channel._address(name, 1))
        assert silent.recv(4)  # it was accepted
        member = RemoteMember(name, 1, 60.0, end)
        member.send("stop", ())
        assert member.receive().result[0] == "stop"


# --- which cores there are


def config(**more: Any) -> Any:
    parallel = {
        "data_parallel_size": 2,
        "data_parallel_size_local": 2,
        "data_parallel_backend": "mp",
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        "data_parallel_index": 1,
    }
    return SimpleNamespace(additional_config={"a": 1}, parallel_config=SimpleNamespace(**parallel | more))


def test_a_core_knows_how_many_there_are() -> None:
    told = config()
    tell(told)
    assert told.additional_config == {"a": 1, KEY: 2}
    told.parallel_config.data_parallel_size = 1  # as vLLM tells a core of a dense model
    assert EngineCores.of(told) == EngineCores(count=2, index=1)
    assert EngineCores.of(config(data_parallel_size=1)) == EngineCores()


@pytest.mark.parametrize(
    "more",
    [
        {"data_parallel_external_lb": True},
        {"data_parallel_hybrid_lb": True},
        {"data_parallel_backend": "ray"},
        {"data_parallel_size_local": 1},
    ],
)
def test_cores_of_other_servers_are_not_spanned(more: dict[str, Any]) -> None:
    told = config(**more)
    tell(told)
    assert KEY not in told.additional_config
    assert beyond_one_server(told)
