# SPDX-License-Identifier: Apache-2.0
"""One flow for each route of `/fp8ext/v1`. Their first parameter, the server, is supplied by the client's methods."""

import base64
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client.bodies import body_of
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, Sent
from vllm_fp8ext.serve.client.repeat import call
from vllm_fp8ext.serve.safetensors_body import PIECE, SafetensorsBody
from vllm_fp8ext.update.contract.fields import WAIT_SECONDS

Content = bytes | Iterable[bytes]
"""A body to send. What is no iterator can be read again, and so be sent again."""

_WEIGHTS = TypeAdapter(schema.Weights)
_MANIFEST = TypeAdapter(dict[str, Any])
_DIGESTS = TypeAdapter(schema.Digests)
_KV_SCALES = TypeAdapter(schema.KvScalesServed)
_VERIFIED = TypeAdapter(schema.Verified)
UPDATE = TypeAdapter(schema.Update)
"""Form of an answer that is an update."""
_COMMITTED = TypeAdapter(schema.Committed)


def weights(endpoint: Endpoint, /) -> Flow[schema.Weights]:
    """Return what is served."""
    return call(endpoint, endpoint.request("GET", "/weights"), _WEIGHTS)


def manifest(endpoint: Endpoint, /, rank: int | None = None) -> Flow[dict[str, Any]]:
    """Return the manifest: every tensor that an update must bring. `update.contract.manifest.Manifest.from_dict` reads it.
    `rank`: what this rank serves alone, with the names under which its slices are sent."""
    query = "" if rank is None else f"?rank={rank}"
    return call(endpoint, endpoint.request("GET", f"/weights/manifest{query}"), _MANIFEST)


def kv_scales(endpoint: Endpoint, /) -> Flow[schema.KvScalesServed]:
    """Scales of the FP8 KV cache that is served, and how well they fitted."""
    return call(endpoint, endpoint.request("GET", "/weights/kv-scales"), _KV_SCALES)


def digests(endpoint: Endpoint, /) -> Flow[schema.Digests]:
    """Digests of what is served."""
    return call(endpoint, endpoint.request("GET", "/weights/digests"), _DIGESTS)


def verify(endpoint: Endpoint, /) -> Flow[schema.Verified]:
    """Compare what every rank serves with what was committed, on its own device.

    Raises:
        UpdateError: `weights-differ`, with the `ranks`.
    """
    return call(endpoint, endpoint.request("POST", "/weights/verify"), _VERIFIED)


def declare_current(
    endpoint: Endpoint,
    /,
    epoch: int,
    *,
    version: str | int | None = None,
    instance: str | None = None,
) -> Flow[schema.Weights]:
    """Say that what a server has loaded is what the others serve. It answers requests from then on.

    `version`: the label of these weights on the others. Refused unless the server serves `epoch`, and is in the life that
    `instance` names, where that is given.
    """
    label = None if version is None else str(version)
    body = body_of(schema.Current, epoch=epoch, version=label, instance=instance)
    return call(endpoint, endpoint.request("POST", "/weights/current", json=_plain(body)), _WEIGHTS)


def open(
    endpoint: Endpoint,
    /,
    *,
    version: str | int | None = None,
    base_epoch: int | None = None,
    instance: str | None = None,
    running: schema.Running = "keep",
    wait_seconds: float | None = None,
    partial: bool = False,
    sparse: bool = False,
    tensors: Mapping[str, schema.TensorClaim] | None = None,
    canary: schema.Canary | None = None,
    kv_scales: schema.KvScales | None = None,
    expert_layout: schema.ExpertLayout | None = None,
    becomes_current: bool = True,
    id: str | None = None,
) -> Flow[schema.Update]:
    """Open an update, or find the one of this `id` again; without one, an id is made up. Refused unless the server serves
    `base_epoch`, and is in the life that `instance` names, where they are given.

    Raises:
        ValueError: an argument that is not what it should be.
    """
    body = body_of(
        schema.OpenUpdate,
        id=id or uuid.uuid4().hex,
        version=None if version is None else str(version),
        base_epoch=base_epoch,
        instance=instance,
        running=running,
        wait_seconds=wait_seconds,
        partial=partial,
        sparse=sparse,
        tensors=None if tensors is None else dict(tensors),
        canary=canary,
        kv_scales=kv_scales,
        expert_layout=expert_layout,
        becomes_current=becomes_current,
    )
    return call(endpoint, endpoint.request("POST", "/updates", json=_plain(body)), UPDATE)


def update(endpoint: Endpoint, /, id: str) -> Flow[schema.Update]:
    """Return the state of an update."""
    return call(endpoint, endpoint.request("GET", f"/updates/{id}"), UPDATE)


def put_chunk(
    endpoint: Endpoint,
    /,
    id: str,
    n: int,
    content: Content,
    length: int | None = None,
    *,
    sha256: bytes | None = None,
    sent: Sent | None = None,
) -> Flow[schema.Update]:
    """Send a safetensors body as chunk `n`; sending it again replaces it.

    `length`: its bytes, needed unless `content` is bytes or a `SafetensorsBody`. `sha256`: of the body, for the server to
    check. `sent`: called with the bytes of the body that have been sent. An iterator is sent once; anything else is repeated
    as needed.
    """
    if length is None:
        if not isinstance(content, bytes | SafetensorsBody):
            raise ValueError(f"expected the length of chunk {n}, found none")
        length = len(content) if isinstance(content, bytes) else content.length
    headers = {"Content-Length": str(length)}
    if sha256 is not None:
        headers["Content-Digest"] = f"sha-256=:{base64.b64encode(sha256).decode()}:"
    request = endpoint.request(
        "PUT",
        f"/updates/{id}/chunks/{n}",
        headers=headers,
        content=_Pieces(content) if isinstance(content, bytes) else content,
        sent=sent,
        repeatable=not isinstance(content, Iterator),
    )
    return call(endpoint, request, UPDATE)


def files(endpoint: Endpoint, /, id: str, path: str | Path) -> Flow[schema.Update]:
    """Let the server read a file or folder of its own disk."""
    body = {"path": str(path)}
    request = endpoint.request("POST", f"/updates/{id}/files", json=body, repeatable=False)
    return call(endpoint, request, UPDATE)


def handles(endpoint: Endpoint, /, id: str, body: schema.Handles) -> Flow[schema.Update]:
    """Let the server read tensors on a GPU of its machine, as chunk `body.n`; they may change once this returns."""
    request = endpoint.request("POST", f"/updates/{id}/handles", json=body.model_dump())
    return call(endpoint, request, UPDATE)


def receive(endpoint: Endpoint, /, id: str, body: schema.Receive) -> Flow[schema.Update]:
    """Tell the server of a bucket that is ready to be broadcast, as chunk `body.n`; its ranks wait for it from now on. The
    chunk is `busy` until it has been staged or refused."""
    json = body.model_dump()
    request = endpoint.request("POST", f"/updates/{id}/receive", json=json, repeatable=False)
    return call(endpoint, request, UPDATE)


def prepare(endpoint: Endpoint, /, id: str) -> Flow[schema.Update]:
    """Validate the whole update."""
    return call(endpoint, endpoint.request("POST", f"/updates/{id}/prepare"), UPDATE)


def commit(endpoint: Endpoint, /, id: str, *, wait_seconds: float | None = None) -> Flow[schema.Update]:
    """Serve the new weights; the response comes when every rank was seen to.

    `wait_seconds`: as the update was opened with; the response may take that much longer.
    """
    request = endpoint.request("POST", f"/updates/{id}/commit", extra_seconds=wait_seconds)
    return call(endpoint, request, UPDATE)


def patience(running: schema.Running, wait_seconds: float | None) -> float | None:
    """How much longer a commit or rollback may take than another call: as long as it may wait for running requests."""
    return WAIT_SECONDS if running == "wait" and wait_seconds is None else wait_seconds


def abandon(endpoint: Endpoint, /, id: str) -> Flow[schema.Update]:
    """Give an update up."""
    return call(endpoint, endpoint.request("DELETE", f"/updates/{id}"), UPDATE)


def rollback(
    endpoint: Endpoint, /, running: schema.Running = "keep", *, wait_seconds: float | None = None
) -> Flow[schema.Committed]:
    """Serve the previous weights again. Never repeated: a second rollback undoes the first."""
    body = schema.Rollback(running=running, wait_seconds=wait_seconds)
    request = endpoint.request(
        "POST",
        "/rollback",
        json=_plain(body),
        extra_seconds=patience(running, wait_seconds),
        repeatable=False,
    )
    return call(endpoint, request, _COMMITTED)


def sleep(
    endpoint: Endpoint, /, level: int = 1, *, requests: Literal["abort", "wait", "keep"] = "abort"
) -> Flow[schema.Weights]:
    """Give the GPU's memory back; at level 2 the weights are discarded, and a full update must follow after waking."""
    body = schema.Sleep.model_validate({"level": level, "requests": requests})
    return call(endpoint, endpoint.request("POST", "/sleep", json=_plain(body)), _WEIGHTS)


def wake(
    endpoint: Endpoint, /, tags: Sequence[Literal["weights", "kv_cache"]] | None = None
) -> Flow[schema.Weights]:
    """Take the memory again: all of it, or only the weights' at first, so that an update can come before the KV cache's."""
    body = schema.Wake(tags=list(tags) if tags else None)
    return call(endpoint, endpoint.request("POST", "/wake", json=_plain(body)), _WEIGHTS)


def load(
    endpoint: Endpoint,
    /,
    path: str | Path,
    *,
    version: str | int | None = None,
    base_epoch: int | None = None,
    instance: str | None = None,
    running: schema.Running = "keep",
    wait_seconds: float | None = None,
    canary: schema.Canary | None = None,
    kv_scales: schema.KvScales | None = None,
    expert_layout: schema.ExpertLayout | None = None,
) -> Flow[schema.Update]:
    """Update from the server's own disk in one call."""
    body = body_of(
        schema.Load,
        path=str(path),
        version=None if version is None else str(version),
        base_epoch=base_epoch,
        instance=instance,
        running=running,
        wait_seconds=wait_seconds,
        canary=canary,
        kv_scales=kv_scales,
        expert_layout=expert_layout,
    )
    request = endpoint.request(
        "POST",
        "/load",
        json=_plain(body),
        extra_seconds=patience(running, wait_seconds),
        repeatable=False,
    )
    return call(endpoint, request, UPDATE)


class _Pieces:
    """Bytes as pieces, so that large ones do not hold up an event loop."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        return (self._content[start : start + PIECE] for start in range(0, len(self._content), PIECE))


def _plain(body: schema.Body) -> dict[str, Any]:
    return body.model_dump(exclude_none=True)
