# SPDX-License-Identifier: Apache-2.0
"""One streamed answer of an OpenAI-compatible server, with the arrival of every token.

`token_counter.py` counts the tokens. Kinds of failure: `connect`, `timeout`, `http-CODE`, `truncated` (the stream ended
without a finish reason), `broken` (no such events), `server-error`, `aborted`, `unfinished`.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import gevent
import msgspec
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError

from vllm_fp8ext.loadtest.prompts import Prompt
from vllm_fp8ext.loadtest.records import TIMEOUT, UNFINISHED, RequestRecord, Span, short
from vllm_fp8ext.loadtest.token_counter import count

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LONGEST_REFUSAL = 16_384
"""Bytes read of the body of an answer that is none."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Whom to ask, and how. `timeout`: seconds for a whole answer. `connections`: most streams at once."""

    url: str
    model: str
    endpoint: str = "completions"
    api_key: str | None = None
    timeout: float = 600.0
    connect_timeout: float = 10.0
    connections: int = 4096
    temperature: float = 1.0
    logprobs: int | None = 0
    """How many of the most likely tokens get a logprob beside the sampled one; None: no logprobs."""


class RequestFailure(Exception):
    """A request failed. `said`: what the server, or the error, said."""

    def __init__(self, kind: str, said: str = "") -> None:
        super().__init__(kind)
        self.said = said


class RequestSender:
    """Asks one server from greenlets."""

    def __init__(self, target: Target) -> None:
        self.target = target
        parts = urlsplit(target.url)
        self._path = parts.path.rstrip("/") + ENDPOINTS[target.endpoint]
        self._client = HTTPClient(
            parts.hostname or "localhost",
            parts.port or (443 if parts.scheme == "https" else 80),
            ssl=parts.scheme == "https",
            concurrency=target.connections,
            connection_timeout=target.connect_timeout,
            network_timeout=target.timeout,
            headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
        )
        if target.api_key:
            self._client.default_headers["Authorization"] = f"Bearer {target.api_key}"

    def close(self) -> None:
        """End all connections."""
        self._client.close()

    def ask(
        self,
        prompt: Prompt,
        body: bytes,
        done: Callable[[RequestRecord], None],
        scheduled: float | None = None,
        step: int | None = None,
    ) -> None:
        """One answer, complete or failed; never raises for what a server does. `body`: of the prompt. `done` gets it in every
        case: a greenlet that is killed leaves a request that is `unfinished`."""
        sent = time.monotonic()
        request = RequestRecord(
            scheduled=sent if scheduled is None else scheduled,
            sent=sent,
            prompt_tokens=len(prompt.token_ids),
            max_tokens=prompt.max_tokens,
            step=step,
        )
        try:
            with gevent.Timeout(self.target.timeout, RequestFailure(TIMEOUT)):
                self._read(body, request)
        except gevent.GreenletExit:
            request.error = UNFINISHED
            raise
        except RequestFailure as failure:
            request.error, request.said = str(failure), short(failure.said) or None
        except (TimeoutError, gevent.Timeout):
            request.error = TIMEOUT
        except HTTPParseError as error:
            request.error, request.said = "truncated" if request.events else "broken", short(str(error))
        except OSError as error:
            request.error, request.said = "truncated" if request.events else "connect", short(str(error))
        except Exception as error:  # events of another form than ours, a URL that can't be asked
            request.error, request.said = "broken", short(repr(error))
        finally:
            request.ended = time.monotonic()
            done(request)

    def body(self, prompt: Prompt) -> bytes:
        """Return the body of the request."""
        return json.dumps(self._fields(prompt)).encode()

    def _fields(self, prompt: Prompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.target.model,
            "max_tokens": prompt.max_tokens,
            "temperature": self.target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "return_token_ids": True,
        }
        logprobs = self.target.logprobs
        if self.target.endpoint == "chat":
            if logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": logprobs}
            return {**body, "messages": [{"role": "user", "content": prompt.text}]}
        if logprobs is not None:
            body["logprobs"] = logprobs
        return {**body, "prompt": list(prompt.token_ids)}

    def _read(self, body: bytes, request: RequestRecord) -> None:
        response = self._client.post(self._path, body=body)
        with response:
            if response.status_code != 200:
                raise RequestFailure(f"http-{response.status_code}", _refusal(response))
            done = False
            while line := response.readline(b"\n"):
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        done = True
                        continue
                    _take(data, request)
        if not done or request.finish is None:
            raise RequestFailure("truncated")
        if request.finish == "abort":
            raise RequestFailure("aborted")


def _refusal(response: Any) -> str:
    body = b""
    with contextlib.suppress(OSError, HTTPParseError):  # the status is known: that is the failure
        body = bytes(response.read(LONGEST_REFUSAL))
    try:
        return _message(json.loads(body))
    except ValueError:
        return body.decode(errors="replace")


def _message(body: Any) -> str:
    """The text in an error of the OpenAI API, or else all of it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


class _Choice(msgspec.Struct):
    """Fields that most parts have of a choice; texts and logprobs are skipped unread."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    weight_versions: list[Any] | None = None


class _Part(msgspec.Struct):
    choices: list[_Choice]
    usage: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Part).decode


def _count_ids(part: _Part, at: float, request: RequestRecord) -> bool:
    """Count the tokens of a part that brings their ids and nothing else that matters; return whether it is one."""
    if part.error is not None or part.usage is not None or request.counted == "usage" or not part.choices:
        return False
    if any(not choice.token_ids or choice.finish_reason or choice.weight_versions for choice in part.choices):
        return False
    request.events.extend((at, len(choice.token_ids or ())) for choice in part.choices)
    return True


def _take(data: bytes, request: RequestRecord) -> None:
    at = time.monotonic()
    with contextlib.suppress(msgspec.DecodeError):  # parts of another form are read whole
        if _count_ids(_decode(data), at, request):
            return
    try:
        part = json.loads(data)
    except ValueError:
        raise RequestFailure("broken", f"expected JSON in an event, found {data!r}") from None
    if not isinstance(part, dict) or part.get("error") is not None:
        raise RequestFailure("server-error", _message(part))
    count(part, at, request)
    for choice in part.get("choices") or ():
        for span in choice.get("weight_versions") or ():
            request.spans.append(Span(span["version"], span["epoch"], span["start"], span["end"]))
        request.finish = choice.get("finish_reason") or request.finish
