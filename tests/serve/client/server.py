# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server that behaves like the routes, keeps what it was sent, and fails where it is told to."""

import base64
import hashlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from safetensors.torch import load
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema

KEY = "secret"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
MANIFEST = {"dtypes": ["bfloat16", "float16", "float32"], "ignored": ["ids"], "tensors": {}}

Fault = Callable[["Handler"], bool]
"""Called before a call is handled; true when it is dealt with."""


def chunk(n: int) -> str:
    """The call that brings it, as `Server.faults` names it."""
    return f"PUT /updates/*/chunks/{n}"


def answer(status: int, content: bytes = b"", kind: str | None = None) -> Fault:
    """This answer instead of the right one; with a kind, as a problem document."""

    def fault(handler: "Handler") -> bool:
        handler.body()
        if kind:
            handler.refuse(UpdateError(kind, f"{kind} it is", status=status))
        else:
            handler.respond(status, content)
        return True

    return fault


def drop(after: int | None = None) -> Fault:
    """The connection ends after so many bytes of the body were read; by default after all of it, nothing being done."""

    def fault(handler: "Handler") -> bool:
        if after is None:
            handler.body()
        else:
            handler.rfile.read(min(after, handler.length))
        handler.hang_up()
        return True

    return fault


def drop_answer(handler: "Handler") -> bool:
    """The call is handled, its answer never comes."""
    handler.answered = False
    return False


def slow(seconds: float) -> Fault:
    """The call is handled after a while."""

    def fault(handler: "Handler") -> bool:
        time.sleep(seconds)
        return False

    return fault


class Server:
    """`faults`: by call (`PUT /updates/*/chunks/1`), what goes wrong, first to last; `journal`: all calls in order; `opened`:
    the update that is open when it begins to listen."""

    def __init__(
        self, journal: list[tuple[str, str]] | None = None, port: int = 0, opened: str | None = None
    ) -> None:
        self.calls: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.faults: dict[str, list[Fault]] = {}
        self.updates: dict[str, schema.Update] = {}
        self.chunks: dict[str, dict[str, bytes]] = {}
        self.required: set[str] = set()
        self.becomes_current: dict[str, bool] = {}
        self.epoch = 0
        self.served: dict[str, Tensor] = {}
        self.state: Any = "serving"
        self.version = "v"
        self.instance = f"{port or id(self):x}"
        self.manifest: dict[str, Any] = dict(MANIFEST)
        self.room = 1 << 30
        self.journal = journal if journal is not None else []
        self._lock = threading.Lock()
        if opened:
            self._open(schema.OpenUpdate(id=opened))
        self._http = _Http(("127.0.0.1", port), Handler)
        self._http.scripted = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def states(self) -> list[str]:
        """Of the updates. What of the calls came last says less: one that was given up may be written down after the next."""
        return [update.state for update in self.updates.values()]

    def stop(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        assert self._http.errors == []

    def note(self, handler: "Handler", call: str) -> Fault | None:
        """Write a call down; the fault that it meets."""
        with self._lock:
            self.calls.append(call)
            self.journal.append((self.url, call))
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            pattern = re.sub(r"(?<=/updates/)[^/]+", "*", call)
            waiting = self.faults.get(pattern, [])
            return waiting.pop(0) if waiting else None

    def handle(self, call: str, body: bytes, headers: Any) -> Any:
        """What the routes do."""
        if headers.get("authorization") != AUTHORIZED["authorization"]:
            raise UpdateError("wrong-key", "the admin key is wrong", status=403)
        with self._lock:
            self.bodies.append(body)
            method, _, path = call.partition(" ")
            match [method, *path.strip("/").split("/")]:
                case ["GET", "weights", "manifest"]:
                    return self.manifest
                case ["GET", "weights"]:
                    return self._weights()
                case ["GET", "weights", "digests"]:
                    return self._digests()
                case ["POST", "weights", "current"]:
                    return self._become_current(schema.Current.model_validate_json(body))
                case ["POST", "updates"]:
                    return self._open(schema.OpenUpdate.model_validate_json(body))
                case ["POST", "rollback"]:
                    running = schema.Rollback.model_validate_json(body).running
                    assert running
                    self.epoch += 1
                    return schema.Committed(epoch=self.epoch, version="old", seconds={"pause": 0.0})
                case ["POST", "load"]:
                    schema.Load.model_validate_json(body)
                    self.epoch += 1
                    return self._new(schema.OpenUpdate(id="loaded"))
                case [_, "updates", id, *rest]:
                    if id not in self.updates:
                        raise UpdateError("unknown-update", f"no update {id}", status=404)
                    return self._updated(self.updates[id], method, rest, body, headers)
        raise AssertionError(call)

    def _open(self, body: schema.OpenUpdate) -> schema.Update:
        if body.id in self.updates:
            return self.updates[body.id]
        busy = [update.id for update in self.updates.values() if update.state in ("open", "prepared")]
        if busy:
            raise UpdateError("update-open", f"update {busy[0]} is open", open=busy[0])
        assert body.id
        self.chunks[body.id] = {}
        self.becomes_current[body.id] = body.becomes_current
        self.updates[body.id] = self._new(body)
        return self.updates[body.id]

    def _new(self, body: schema.OpenUpdate) -> schema.Update:
        return schema.Update(
            id=body.id or "",
            state="open",
            version=body.version or f"epoch-{self.epoch + 1}",
            running=body.running,
            base_epoch=body.base_epoch,
            opened_at=time.time(),
            tensors_required=len(self.required),
            tensors_missing=len(self.required),
            missing=sorted(self.required),
            bytes=0,
            chunks={},
            problems=[],
            seconds={},
            quantization_error=None,
            max_chunk_bytes=self.room,
            result=None,
        )

    def _updated(
        self, update: schema.Update, method: str, rest: list[str], body: bytes, headers: Any
    ) -> schema.Update:
        match [method, *rest]:
            case ["GET"]:
                return update
            case ["DELETE"]:
                self._require(update, "open", "prepared", "abandoned")
                update.state = "abandoned"
            case ["POST", "prepare"]:
                self._require(update, "open", "prepared")
                self._complete(update)
                update.state = "prepared"
            case ["POST", "commit"]:
                self._require(update, "open", "prepared", "committed")
                if update.state != "committed":
                    self.served = self._complete(update)
                    self.epoch += 1
                    self.version = update.version
                    if self.becomes_current[update.id]:
                        self.state = "serving"
                    elif self.state != "serving":
                        self.state = "not-current"
                    update.state = "committed"
                    update.result = {"epoch": self.epoch, "version": update.version, "pause_seconds": 0.0}
            case ["POST", "files"]:
                schema.Files.model_validate_json(body)
            case ["PUT", "chunks", n]:
                self._require(update, "open", "prepared")
                sha256 = check_digest(headers.get("content-digest"), body)
                tensors = load(body)
                self.chunks[update.id][n] = body
                update.chunks[n] = schema.ChunkState(
                    staged=True, bytes=len(body), tensors=len(tensors), sha256=sha256
                )
                update.state = "open"
            case _:
                raise AssertionError(method, rest)
        return update

    def _require(self, update: schema.Update, *states: str) -> None:
        if update.state not in states:
            raise UpdateError("wrong-state", f"update {update.id} is {update.state}")

    def _complete(self, update: schema.Update) -> dict[str, Tensor]:
        collected: dict[str, Tensor] = {}
        for body in self.chunks[update.id].values():
            collected |= load(body)
        missing = sorted(self.required - collected.keys())
        if missing:
            raise UpdateError("incomplete", f"the update lacks {missing}", status=422, missing=missing)
        return collected

    def _weights(self) -> schema.Weights:
        return schema.Weights(
            epoch=self.epoch,
            version=self.version,
            instance=self.instance,
            state=self.state,
            poisoned=None,
            update=None,
            previous_version=None,
            previous_epoch=None,
            scale_format="fp32",
            kv_scales=None,
            kv_cache_dtype="auto",
            staging="shadow",
            twin_bytes=[0],
            twin_kv_blocks=0,
            compiled=[],
            last_update=None,
        )

    def _digests(self) -> schema.Digests:
        hashed = {name: hashlib.sha256(tensor.numpy()).hexdigest() for name, tensor in self.served.items()}
        return schema.Digests(
            epoch=self.epoch,
            version=self.version,
            instance=self.instance,
            digests={name: {"0": digest} for name, digest in hashed.items()},
            addresses=[],
        )

    def _become_current(self, body: schema.Current) -> schema.Weights:
        if body.epoch != self.epoch or body.instance not in (None, self.instance):
            raise UpdateError("stale-base", "another epoch is served")
        self.state, self.version = "serving", body.version or self.version
        return self._weights()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    scripted: Server

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.errors: list[BaseException | None] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may go away; anything else fails the test."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.errors.append(error)


def check_digest(header: str | None, body: bytes) -> str | None:
    """As RFC 9530 says; the digest in hexadecimal."""
    if header is None:
        return None
    [matches] = re.findall(r"^sha-256=:(.*):$", header)
    if base64.b64decode(matches) != hashlib.sha256(body).digest():
        raise UpdateError("digest-mismatch", "the body is not what was hashed", status=400)
    return base64.b64decode(matches).hex()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = 120
    answered = True

    @property
    def scripted(self) -> Server:
        assert isinstance(self.server, _Http)
        return self.server.scripted

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length") or 0)

    def body(self) -> bytes:
        return self.rfile.read(self.length)

    def respond(self, status: int, content: bytes, media_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", media_type)
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, error: UpdateError) -> None:
        body = {**error.details, "type": schema.PROBLEM + error.kind, "title": error.kind}
        body |= {"status": error.status, "detail": str(error)}
        self.respond(error.status, json.dumps(body).encode(), "application/problem+json")

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _any(self) -> None:
        self.answered = True
        call = f"{self.command} {self.path.removeprefix(schema.PREFIX)}"
        fault = self.scripted.note(self, call)
        if fault:
            ended = fault(self)
            assert isinstance(ended, bool), f"expected a fault, found what makes one: {fault}"
            if ended:
                return
        try:
            assert self.headers.get("transfer-encoding") is None
            result = self.scripted.handle(call, self.body(), self.headers)
        except UpdateError as error:
            self.refuse(error)
            return
        if not self.answered:
            self.hang_up()
            return
        content = json.dumps(result) if isinstance(result, dict) else result.model_dump_json()
        self.respond(201 if call == "POST /updates" else 200, content.encode())

    do_GET = do_POST = do_PUT = do_DELETE = _any

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""
