# SPDX-License-Identifier: Apache-2.0
"""`locust -f …/locustfile.py --host http://server`: rollout traffic, with weights changing under it.

With several locust processes each sends its part, and the first one changes weights, scrapes and writes the report.
"""

import logging
import sys
import time
from typing import Any, NoReturn

import gevent
from gevent.pool import Group
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from vllm_fp8ext.errors import Fp8ExtError
from vllm_fp8ext.loadtest import options
from vllm_fp8ext.loadtest.locust_run import LocustRun, named_by
from vllm_fp8ext.loadtest.report import INVALID
from vllm_fp8ext.loadtest.rollout_steps import BEGIN, DONE

GIVEN: dict[int, tuple[str, str]] = {}
"""Options of the command line, for each environment of this process."""
LOADS: dict[int, LocustRun] = {}
"""The load of each environment of this process."""
IDLE_SECONDS = 3600.0
SETTLE_SECONDS = 5.0
"""Seconds that the first process waits for the last reports. Workers send theirs every three seconds."""
QUIT_SECONDS = 0.5
"""For workers to be told that nothing begins."""


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    options.add(parser)


@events.init.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    if environment.host is None and environment.parsed_options is not None:
        environment.host = environment.parsed_options.host
    if environment.parsed_options is not None and not isinstance(environment.runner, WorkerRunner):
        GIVEN[id(environment)] = named_by(environment)
    profile = environment.parsed_options.traffic if environment.parsed_options else "closed"
    if environment.runner is not None:
        environment.runner.register_message(
            BEGIN, lambda msg, **_: LOADS[id(environment)].rollouts.begun(msg.data)
        )
        environment.runner.register_message(
            DONE, lambda msg, **_: LOADS[id(environment)].rollouts.done(msg.data)
        )
    environment.user_classes = [{"closed": Closed, "rollout": Rollout}.get(profile, Open)]


@events.test_start.add_listener
def _begin(environment: Environment, **_: Any) -> None:
    LOADS.pop(id(environment), None)
    try:
        load = LocustRun(environment, GIVEN.get(id(environment)))
        load.begin(watching=not isinstance(environment.runner, WorkerRunner))
    except Exception as error:  # locust would log it, and start the users all the same
        if not isinstance(error, Fp8ExtError | ValueError):
            logging.getLogger(__name__).exception("fp8ext: an error of its own")
        _refuse(environment, " ".join(str(error).split()) or type(error).__name__)
    LOADS[id(environment)] = load


def _refuse(environment: Environment, reason: str) -> NoReturn:
    """Start no users: end locust, unless there is a web page on which to choose again."""
    runner, parsed = environment.runner, environment.parsed_options
    if runner is not None and not isinstance(runner, WorkerRunner) and parsed and not parsed.headless:
        logging.getLogger(__name__).error(f"fp8ext: {reason}")
        runner.log_exception("local", f"fp8ext: {reason}", "")
        raise gevent.GreenletExit
    print(f"fp8ext: {reason}", file=sys.stderr, flush=True)
    if isinstance(runner, MasterRunner):
        runner.send_message("quit")
        gevent.sleep(QUIT_SECONDS)
    raise SystemExit(INVALID)


@events.spawning_complete.add_listener
def _lead(**_: Any) -> None:
    for load in LOADS.values():
        runner = load.environment.runner
        leads = load.options.profile == "rollout" and not isinstance(runner, WorkerRunner)
        if leads and not load.rollouts.led:
            load.leading = gevent.spawn(_steps, load)


def _steps(load: LocustRun) -> None:
    load.lead()
    if load.environment.runner is not None:
        load.environment.runner.quit()


@events.test_stopping.add_listener
def _stop(environment: Environment, **_: Any) -> None:
    load = LOADS.get(id(environment))
    if load is not None:
        load.run.stop = time.monotonic()


@events.test_stop.add_listener
def _end(environment: Environment, **_: Any) -> None:
    load = LOADS.get(id(environment))
    if load is None and isinstance(environment.runner, WorkerRunner):
        return  # the first process has said why
    if load is None:
        logging.getLogger(__name__).error(
            "fp8ext: the run ended before it had begun: a longer --run-time (--time)?"
        )
        environment.process_exit_code = INVALID
        return
    load.end()
    if isinstance(environment.runner, WorkerRunner):
        return
    if isinstance(environment.runner, MasterRunner):
        environment.runner.send_message("stop")  # locust does at the end of --time only when all is over
        gevent.sleep(SETTLE_SECONDS)
    load.report()


@events.report_to_master.add_listener
def _send(client_id: str, data: dict[str, Any]) -> None:
    data["fp8ext"] = [load.take() for load in LOADS.values()]


@events.worker_report.add_listener
def _receive(client_id: str, data: dict[str, Any]) -> None:
    for load, records in zip(LOADS.values(), data.get("fp8ext") or [], strict=False):
        load.merge(records)


class _Asking(User):
    abstract = True

    @property
    def load(self) -> LocustRun:
        """The load that this user is part of."""
        return LOADS[id(self.environment)]


class Closed(_Asking):
    """Each user sends its next request when the answer to the last one is complete."""

    wait_time = constant(0)

    @task
    def ask(self) -> None:
        """One request."""
        self.load.ask()


class _Spawning(_Asking):
    """Has requests under way beside each other, which end with it."""

    abstract = True

    def on_start(self) -> None:
        """Nothing is under way."""
        self.running = Group()

    def on_stop(self) -> None:
        """End what is."""
        self.running.kill()


class Open(_Spawning):
    """Open-loop traffic: the first user of a process sends all its requests on time, however slow the server. There must be
    as many users as processes."""

    @task
    def dispatch(self) -> None:
        """Keep to the timetable until the run ends."""
        if not self.load.first_user():
            gevent.sleep(IDLE_SECONDS)
            return
        self.load.keep_to_timetable(self.running)


class Rollout(_Spawning):
    """As an RL trainer: all answers of a step at once, then an update, then the next step. The first user of a process asks
    its part. There must be as many users as processes."""

    @task
    def steps(self) -> None:
        """Run steps until the run ends or its number of steps is reached."""
        if self.load.first_user():
            self.load.roll_out(self.running)
        gevent.sleep(IDLE_SECONDS)
