# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of `/fp8ext/v1`: the one place that knows the HTTP API. Needs neither torch nor vLLM."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import TypeAdapter

from vllm_fp8ext.environment import ADMIN_KEY, URL
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.safetensors_file import Body, bodies, ranges_of

DEFAULT_URL = "http://127.0.0.1:8000"
CHUNK_BYTES = 256 << 20

Progress = Callable[[int, int], None]
"""Called with bytes sent and bytes in all."""


class Client:
    """One server's weights.

    `url`: the server's root (`FP8EXT_URL`, else port 8000 of this machine). `key`: the admin key (`FP8EXT_ADMIN_KEY`). Every
    method raises `UpdateError` when the server refuses, `httpx.HTTPError` when it can't be reached.
    """

    def __init__(self, url: str | None = None, key: str | None = None, *, timeout: float = 600.0) -> None:
        root = (url or os.environ.get(URL) or DEFAULT_URL).rstrip("/")
        key = key or os.environ.get(ADMIN_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=root + schema.PREFIX, headers=headers, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def weights(self) -> schema.Weights:
        """What is served."""
        return schema.Weights.model_validate(self._call("GET", "/weights"))

    def manifest(self) -> dict[str, Any]:
        """What an update must bring (`weights.manifest.Manifest.from_dict` reads it)."""
        return TypeAdapter(dict[str, Any]).validate_python(self._call("GET", "/weights/manifest"))

    def digests(self) -> schema.Digests:
        """Digests of what is served."""
        return schema.Digests.model_validate(self._call("GET", "/weights/digests"))

    def open(
        self,
        *,
        version: str | None = None,
        base_epoch: int | None = None,
        running: schema.Running = "keep",
        id: str | None = None,
    ) -> schema.Update:
        """Open an update."""
        body = schema.OpenUpdate(id=id, version=version, base_epoch=base_epoch, running=running)
        return self._update("POST", "/updates", json=body.model_dump(exclude_none=True))

    def update(self, id: str) -> schema.Update:
        """Where an update stands."""
        return self._update("GET", f"/updates/{id}")

    def put_chunk(self, id: str, n: int, content: bytes | Iterator[bytes], length: int) -> schema.Update:
        """Send a safetensors body of `length` bytes as chunk `n`; sending it again replaces it."""
        return self._update(
            "PUT", f"/updates/{id}/chunks/{n}", content=content, headers={"Content-Length": str(length)}
        )

    def files(self, id: str, path: str | Path) -> schema.Update:
        """Let the server read a file or folder of its own disk."""
        return self._update("POST", f"/updates/{id}/files", json={"path": str(path)})

    def prepare(self, id: str) -> schema.Update:
        """Validate the whole update."""
        return self._update("POST", f"/updates/{id}/prepare")

    def commit(self, id: str) -> schema.Update:
        """Serve the new weights; the response comes when every rank does."""
        return self._update("POST", f"/updates/{id}/commit")

    def abandon(self, id: str) -> schema.Update:
        """Give an update up."""
        return self._update("DELETE", f"/updates/{id}")

    def rollback(self, running: schema.Running = "keep") -> schema.Committed:
        """Serve the previous weights again."""
        return schema.Committed.model_validate(self._call("POST", "/rollback", json={"running": running}))

    def load(
        self, path: str | Path, *, version: str | None = None, running: schema.Running = "keep"
    ) -> schema.Update:
        """Update from the server's own disk in one call."""
        body = schema.Load(path=str(path), version=version, running=running)
        return self._update("POST", "/load", json=body.model_dump(exclude_none=True))

    def push(
        self,
        checkpoint: str | Path,
        *,
        version: str | None = None,
        base_epoch: int | None = None,
        running: schema.Running = "keep",
        chunk_bytes: int = CHUNK_BYTES,
        progress: Progress | None = None,
    ) -> schema.Update:
        """Send a checkpoint (a folder of safetensors, or one file) and commit it. A refused update is abandoned.

        Raises:
            ValueError: the checkpoint can't be read.
        """
        ranges = ranges_of(Path(checkpoint))
        update = self.open(version=version, base_epoch=base_epoch, running=running)
        parts = bodies(ranges, min(chunk_bytes, (update.max_chunk_bytes or chunk_bytes * 2) // 2))
        total = sum(part.length for part in parts)
        try:
            sent = 0
            for n, part in enumerate(parts):
                self.put_chunk(update.id, n, _counted(part, sent, total, progress), part.length)
                sent += part.length
            return self.commit(update.id)
        except BaseException:
            self._abandon_quietly(update.id)
            raise

    def _abandon_quietly(self, id: str) -> None:
        with contextlib.suppress(
            UpdateError, httpx.HTTPError
        ):  # the error that led here is the one to report
            self.abandon(id)

    def _update(self, method: str, path: str, **request: Any) -> schema.Update:
        return schema.Update.model_validate(self._call(method, path, **request))

    def _call(self, method: str, path: str, **request: Any) -> Any:
        response = self._http.request(method, path, **request)
        if response.is_success:
            return response.json()
        raise _refused(response)


def _refused(response: httpx.Response) -> UpdateError:
    """The error in a problem document, or in whatever else came back."""
    try:
        body = response.json()
        kind = str(body["type"]).removeprefix(schema.PROBLEM)
        details = {
            key: value for key, value in body.items() if key not in ("type", "title", "status", "detail")
        }
        return UpdateError(kind, body["detail"], status=response.status_code, **details)
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {response.status_code} from {response.request.url}: {response.text[:200]}"
        if response.status_code == 404:
            message += " (are the routes mounted? the server needs VLLM_PLUGINS=fp8ext and FP8EXT_ADMIN_KEY)"
        return UpdateError("http", message, status=response.status_code)


def _counted(body: Body, before: int, total: int, progress: Progress | None) -> Iterator[bytes]:
    sent = before
    for piece in body.read():
        yield piece
        sent += len(piece)
        if progress:
            progress(sent, total)
