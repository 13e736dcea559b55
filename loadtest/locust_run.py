# SPDX-License-Identifier: Apache-2.0
"""One run inside a locust process: what it asks, changes and writes down."""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import httpx
from gevent.pool import Group
from locust.env import Environment
from locust.runners import DistributedRunner, WorkerRunner

from vllm_fp8ext.environment import API_KEY, key_of
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.loadtest import http_client, report
from vllm_fp8ext.loadtest import options as options_of
from vllm_fp8ext.loadtest.arrivals import timetable
from vllm_fp8ext.loadtest.latency import ttft
from vllm_fp8ext.loadtest.metrics_scraper import scrape_forever
from vllm_fp8ext.loadtest.prompts import Lengths, Prompt, Shared, prompts
from vllm_fp8ext.loadtest.records import (
    UNFINISHED,
    RequestRecord,
    RunRecords,
    UpdateRecord,
    plain,
    request_of,
    short,
)
from vllm_fp8ext.loadtest.rollout_steps import Rollouts
from vllm_fp8ext.loadtest.stream import RequestSender, Target
from vllm_fp8ext.loadtest.weight_updates import Pusher

HEARTBEAT_SECONDS = 0.02
LEAD_SECONDS = 0.2
"""From the start of a run to the first entry of a timetable."""


def named_by(environment: Environment) -> tuple[str, str]:
    """The host and the folder for reports that an environment is to have; empty: none."""
    assert environment.parsed_options is not None
    return str(environment.host or "").rstrip("/"), environment.parsed_options.report or ""


class LocustRun:
    """Everything of one run in one process. Of several locust processes each takes every so many-th prompt and arrival.
    `command_line`: what its command line names (`named_by`), in the first process.

    Raises:
        ValueError: an option that is not valid, or no server at the URL.
    """

    def __init__(self, environment: Environment, command_line: tuple[str, str] | None) -> None:
        assert environment.parsed_options is not None
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each scrape otherwise
        self.environment = environment
        self.options = options_of.of(environment.parsed_options)
        self.url, report = named_by(environment)
        if not self.url:
            raise ValueError("host: expected the URL of a server (--host, or fp8ext bench load --url)")
        if command_line is not None:
            _require(command_line, (self.url, report))
        self.run = RunRecords(options={**self.options.as_dict(), "url": self.url})
        self._part, self._parts = self._share()
        self._require_users()
        self.rollouts = Rollouts(environment, self._parts)
        shared = Shared.parse(self.options.shared_prefix) if self.options.shared_prefix else None
        self._prompts = prompts(
            f"{self.options.seed} {self._part}",
            Lengths.parse(self.options.input_tokens),
            Lengths.parse(self.options.output_tokens),
            self.options.vocabulary,
            shared,
        )
        self._asker = RequestSender(self._target())
        self._watching = Group()
        self._pusher: Pusher | None = None
        self._taken = 0
        self._dispatching = False
        self.leading: gevent.Greenlet[Any] | None = None
        """Return the leader of rollout steps, in the process that has it."""

    def begin(self, *, watching: bool) -> None:
        """Start the clock; `watching`: this process also changes weights and scrapes.

        Raises:
            ConfigError: updates that can't be made; the clock does not start.
        """
        if watching and self.options.update_every:
            self._pusher = Pusher(self.options.pusher(self.url))
        self.run.start = time.monotonic()
        self._watching.spawn(self._beat)
        if watching:
            self._watching.spawn(scrape_forever, self.url, self.options.scrape_every, self.run.scrapes)
            if self.options.update_seconds:
                self._watching.spawn(self._update_every, self.options.update_seconds)

    def end(self) -> None:
        """Stop everything that goes on beside the users; the clock was stopped (`run.stop`)."""
        if self.leading is not None and self.leading is not gevent.getcurrent():
            self.leading.kill()
        self._watching.kill()
        if self._pusher is not None:
            self._pusher.close()
        self._asker.close()

    def report(self) -> None:
        """Show and write what was measured; locust's exit code becomes 1 when an SLO is broken, 2 when the run is invalid."""
        code = report.write(self.run, Path(self.options.report) if self.options.report else None)
        if self.environment.process_exit_code in (None, 0):
            self.environment.process_exit_code = code

    def first_user(self) -> bool:
        """Return whether this is the first call in this process."""
        first, self._dispatching = not self._dispatching, True
        return first

    def timetable(self) -> Iterator[float]:
        """When this process sends, in an open loop."""
        kind = self.options.profile
        for number, at in enumerate(timetable(kind, self.options.rate, str(self.options.seed))):
            if number % self._parts == self._part:
                yield self.run.start + LEAD_SECONDS + at

    @staticmethod
    def sleep_until(at: float) -> None:
        """Sleep, but not past a time."""
        while (left := at - time.monotonic()) > 0:
            gevent.sleep(left)

    def ask(self) -> None:
        """The next request of this process, written down."""
        prompt, body = self._next()
        self._asker.ask(prompt, body, self._done)

    def keep_to_timetable(self, running: Group) -> None:
        """This process's part of an open loop."""
        for at in self.timetable():
            prompt, body = self._next()  # to make a long one takes longer than a request may be late
            self.sleep_until(at)
            running.spawn(self._asker.ask, prompt, body, self._done, at)

    def roll_out(self, running: Group) -> None:
        """This process's part of each rollout step."""

        def make() -> list[tuple[Prompt, bytes]]:
            return [self._next() for _ in range(self._part, self.options.prompts, self._parts)]

        def ask(prompts: list[tuple[Prompt, bytes]], number: int, began: float) -> None:
            self.sleep_until(began)
            for prompt, body in prompts:
                for _ in range(self.options.samples):
                    running.spawn(self._asker.ask, prompt, body, self._done, began, number)
            running.join()

        self.rollouts.follow(make, ask)

    def _next(self) -> tuple[Prompt, bytes]:
        prompt = next(self._prompts)
        return prompt, self._asker.body(prompt)

    def lead(self) -> None:
        """Rollout steps, with an update after each if there are to be any."""
        updating: gevent.Greenlet[Any] | None = None
        for step in self.rollouts.lead(self.options.steps):
            self.run.steps.append(step)
            if self.options.update_every == "step":
                if updating is not None:
                    updating.join()  # one step off: the last one had a whole step's time
                updating = self._watching.spawn(self._update, step.number)
                if not self.options.one_step_off:
                    updating.join()

    def take(self) -> dict[str, Any]:
        """Return the records since the last call."""
        new, lags = self.run.requests[self._taken :], self.run.lags
        self._taken, self.run.lags = len(self.run.requests), []
        return {"requests": [plain(request) for request in new], "lags": lags}

    def merge(self, records: dict[str, Any]) -> None:
        """Take the records of another process."""
        self.run.requests += [request_of(one) for one in records["requests"]]
        self.run.lags += records["lags"]

    def _beat(self) -> None:
        while True:
            due = time.monotonic() + HEARTBEAT_SECONDS
            gevent.sleep(HEARTBEAT_SECONDS)
            self.run.lags.append(time.monotonic() - due)

    def _done(self, request: RequestRecord) -> None:
        self.run.requests.append(request)
        if request.error == UNFINISHED:
            return
        for name, seconds in (
            ("answer", request.ended - request.scheduled),
            ("first token", ttft(request)),
        ):
            if seconds is None:
                continue
            self.environment.events.request.fire(  # type: ignore[no-untyped-call]  # locust has no types here
                request_type="POST",
                name=name,
                response_time=seconds * 1e3,
                response_length=request.tokens,
                exception=RuntimeError(request.error) if request.error and name == "answer" else None,
                context={},
            )

    def _update(self, step: int | None = None) -> None:
        assert self._pusher is not None
        began = time.monotonic()
        try:
            self.run.updates.append(self._pusher.push(step))
        except gevent.GreenletExit:
            version, now = f"update-{len(self.run.updates) + 1}", time.monotonic()
            self.run.updates.append(UpdateRecord(version, began, now, now, error=UNFINISHED, step=step))
            raise

    def _update_every(self, seconds: float) -> None:
        at = self.run.start
        while True:
            at = max(at + seconds, time.monotonic())
            self.sleep_until(at)
            self._update()

    def _require_users(self) -> None:
        """Require that many users where one of each process sends; on the web page they are chosen later."""
        parsed = self.environment.parsed_options
        users = getattr(parsed, "num_users", None) if getattr(parsed, "headless", False) else None
        if self.options.profile != "closed" and users is not None and users < self._parts:
            raise ValueError(f"users: expected one for each of {self._parts} processes, found {users}")

    def _share(self) -> tuple[int, int]:
        runner, parsed = self.environment.runner, self.environment.parsed_options
        if not isinstance(runner, DistributedRunner):
            return 0, 1
        processes = int(getattr(parsed, "processes", None) or getattr(parsed, "expect_workers", None) or 1)
        return max(0, runner.worker_index) % processes if isinstance(runner, WorkerRunner) else 0, processes

    def _target(self) -> Target:
        key = key_of(os.environ.get(API_KEY), API_KEY)
        return Target(
            url=self.url,
            model=_model(self.url, key, self.options.model),
            endpoint=self.options.endpoint,
            api_key=key,
            timeout=self.options.timeout,
            temperature=self.options.temperature,
            logprobs=self.options.logprobs,
        )


def _model(url: str, key: str | None, named: str | None) -> str:
    """The model to ask for: the named one, else the first that the server lists. The server is asked in either case, so that
    one that is not there is told before the load."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with http_client.client(timeout=30) as client:
            answer = client.get(f"{url}/v1/models", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"expected a server at {url}, found none: {error or type(error).__name__}"
        ) from error
    try:
        return named or str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
        answered = f"HTTP {answer.status_code}: {short(answer.text)}"
        raise ConfigError(
            f"expected a list of models at {url}/v1/models, found {answered} (or name one with --model)"
        ) from error


def _require(command_line: tuple[str, str], web_page: tuple[str, str]) -> None:
    """Refuse another server and other paths from the web page. Anybody may open it: another server would be sent our keys."""
    for option, expected, chosen in zip(("host", "report"), command_line, web_page, strict=True):
        if chosen != expected:
            raise ValueError(
                f"{option}: expected that of the command line, {expected or 'which names none'}, found {chosen or 'none'}"
            )
