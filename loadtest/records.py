# SPDX-License-Identifier: Apache-2.0
"""Records of a run: requests, updates, scrapes and steps. Times are seconds of one monotonic clock of the machine that asks;
a report subtracts the start of the run."""

from dataclasses import dataclass, field
from typing import Any

UNFINISHED = "unfinished"
"""Error of a request that the end of the run cut off: no failure of the server's."""
TIMEOUT = "timeout"
"""Error of a request that was not complete in time: what it waited for took longer than that."""
TEXT = 200
"""Characters of an error's text that are kept."""


def short(text: str) -> str:
    """An error's text as one line of at most `TEXT` characters."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT else line[: TEXT - 1] + "…"


@dataclass
class Span:
    """Tokens `[start, end)` of an answer, sampled by one version of the weights. The server says which."""

    version: str
    epoch: int
    start: int
    end: int


@dataclass
class RequestRecord:
    """One streamed answer.

    `scheduled`: when it was to be sent; in a closed loop, when it was sent. `events`: arrival and number of tokens of each
    part of the stream that had tokens. `counted`: whether tokens were counted by their ids, or by `usage`, which some servers
    tell only at the end. `error`: kind of failure, see `stream.py`; `said`: its text, the server's where there is one.
    `step`: of a rollout.
    """

    scheduled: float
    sent: float
    ended: float = 0.0
    prompt_tokens: int = 0
    max_tokens: int = 0
    events: list[tuple[float, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    said: str | None = None
    counted: str = "ids"
    step: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.events)

    @property
    def first(self) -> float | None:
        """Arrival of the first token."""
        return self.events[0][0] if self.events else None


@dataclass
class UpdateRecord:
    """One change of weights under load.

    `began`: the push began. `commit_sent`, `committed`: around the call that exchanged the weights; for a server without
    commits, the whole call. `epoch`: the server's, if it has one; a reload of stock vLLM has none. `error`: kind of failure;
    `said`: its text.
    """

    version: str
    began: float
    commit_sent: float = 0.0
    committed: float = 0.0
    epoch: int | None = None
    pause_seconds: float | None = None
    error: str | None = None
    said: str | None = None
    step: int | None = None


@dataclass
class StepRecord:
    """One rollout step: all its answers are there at `ended`."""

    number: int
    began: float
    ended: float


@dataclass
class ScrapeRecord:
    """Values of the server's `/metrics` at one time."""

    at: float
    values: dict[str, float]


@dataclass
class RunRecords:
    """Everything of one run. `options`: how it was asked for. `start`, `stop`: of the load."""

    options: dict[str, Any]
    start: float = 0.0
    stop: float = 0.0
    requests: list[RequestRecord] = field(default_factory=list)
    updates: list[UpdateRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    scrapes: list[ScrapeRecord] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    """Lateness of the generator's own wake-ups, measured many times a second. What it reads then looks late too."""


def plain(request: RequestRecord) -> dict[str, Any]:
    """For another process. Copies nothing, as `dataclasses.asdict` does: a stream's next token would be read late."""
    return {**vars(request), "spans": [vars(span) for span in request.spans]}


def request_of(data: dict[str, Any]) -> RequestRecord:
    """The inverse of `plain`."""
    spans = [Span(**span) for span in data["spans"]]
    events = [(float(at), int(count)) for at, count in data["events"]]
    return RequestRecord(**{**data, "spans": spans, "events": events})
