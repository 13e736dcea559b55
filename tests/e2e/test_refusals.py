# SPDX-License-Identifier: Apache-2.0
"""Every bad update is refused with its own problem, and leaves the served model bit for bit as it was."""

import base64
import hashlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save

from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.safetensors_body import bodies
from vllm_fp8ext.serve.safetensors_file import ranges_of
from vllm_fp8ext.serve.schema import TensorClaim
from vllm_fp8ext.update.contract.checkpoint_files import INDEX
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.worker.digest import checkpoint_digests

from .ask import state
from .conftest import FIRST

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def unchanged(single: Server):
    """Fails when the test has changed anything that is served."""
    yield from _left_as_it_was(single)


@pytest.fixture
def pair_unchanged(pair: Server):
    """The same for two ranks."""
    yield from _left_as_it_was(pair)


LEFT: dict[str, dict[str, Any]] = {}
"""State in which the last test left a server, by its address."""


def _left_as_it_was(server: Server):
    before = LEFT.get(server.url)
    with server.client() as client:
        if before is None or before["epoch"] != client.weights().epoch:
            before = state(server)
    yield server
    with server.client() as client:
        open_update = client.weights().update
        if open_update:
            client.abandon(open_update)
    LEFT[server.url] = state(server)
    assert LEFT[server.url] == before


def _with(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = load_file(LATE / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    return tensors


def _poked(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor.view(-1)[7] = value
    return tensor


BODIES: dict[str, tuple[str, Callable[[], dict[str, torch.Tensor]], str]] = {
    "q_proj alone": ("incomplete", lambda: {Q_PROJ: load_file(LATE / "model.safetensors")[Q_PROJ]}, "k_proj"),
    "unknown name": (
        "unknown-tensor",
        lambda: _with(Q_PROJ, lambda t: t) | {"model.extra": torch.ones(3)},
        "model.extra",
    ),
    "wrong shape": ("wrong-shape", lambda: _with(Q_PROJ, lambda t: t.t()[:128]), Q_PROJ),
    "wrong dtype": ("wrong-dtype", lambda: _with(Q_PROJ, lambda t: t.double()), Q_PROJ),
    "NaN in a quantized layer": ("non-finite", lambda: _with(Q_PROJ, lambda t: _poked(t, torch.nan)), Q_PROJ),
    "infinity in a quantized layer": (
        "non-finite",
        lambda: _with(Q_PROJ, lambda t: _poked(t, torch.inf)),
        Q_PROJ,
    ),
    "NaN in a norm": ("non-finite", lambda: _with(NORM, lambda t: _poked(t, torch.nan)), NORM),
    "Inf in an embedding": (
        "non-finite",
        lambda: _with("model.embed_tokens.weight", lambda t: _poked(t, torch.inf)),
        "embed_tokens",
    ),
    "several at once": (
        "invalid-tensors",
        lambda: _with(Q_PROJ, lambda t: t[:1]) | {"model.extra": torch.ones(3)},
        "model.extra",
    ),
}


@pytest.mark.parametrize(
    "case", ["q_proj alone", "NaN in a quantized layer", "infinity in a quantized layer"]
)
def test_bad_tensors_of_two_ranks(pair_unchanged: Server, case: str):
    _refused(pair_unchanged, case)


@pytest.mark.parametrize("case", BODIES)
def test_bad_tensors(unchanged: Server, case: str):
    _refused(unchanged, case)


def _refused(server: Server, case: str):
    kind, make, named = BODIES[case]
    body = save(make())
    with server.client() as client:
        update = client.open(version="bad")
        if kind == "incomplete":
            client.put_chunk(update.id, 0, body, len(body))
            with pytest.raises(UpdateError) as refused:
                client.commit(update.id)
        else:
            with pytest.raises(UpdateError) as refused:
                client.put_chunk(update.id, 0, body, len(body))
        assert (refused.value.kind, refused.value.status) == (kind, 422)
        assert named in json.dumps(refused.value.details)
        if case == "q_proj alone":
            assert len(refused.value.details["missing"]) == 34
        with pytest.raises(UpdateError, match="lacks"):
            client.commit(update.id)


def _broken(edit: Callable[[bytes], bytes]) -> bytes:
    return edit((LATE / "model.safetensors").read_bytes())


def _twice(data: bytes) -> bytes:
    """A header that has one name twice."""
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].rstrip().replace(NORM.encode(), Q_PROJ.encode())
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _lying(data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header[Q_PROJ]["data_offsets"][1] += 64
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


BROKEN: dict[str, tuple[str, int, Callable[[bytes], bytes]]] = {
    "truncated": ("broken-safetensors", 422, lambda data: data[:-100]),
    "trailing bytes": ("broken-safetensors", 422, lambda data: data + b"more"),
    "garbage": (
        "broken-safetensors",
        422,
        lambda data: b"not safetensors at all, but long enough to look at",
    ),
    "header longer than the body": (
        "broken-safetensors",
        422,
        lambda data: struct.pack("<Q", 1 << 40) + data[8:],
    ),
    "empty": ("broken-safetensors", 422, lambda data: b""),
    "header lies about offsets": ("broken-safetensors", 422, _lying),
    "a name twice": ("duplicate-tensor", 422, _twice),
    "oversized header": (
        "header-too-large",
        413,
        lambda data: struct.pack("<Q", (16 << 20) + 1) + b" " * ((16 << 20) + 1),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_safetensors(unchanged: Server, case: str):
    kind, status, edit = BROKEN[case]
    body = _broken(edit)
    with unchanged.client() as client:
        update = client.open()
        with pytest.raises(UpdateError) as refused:
            client.put_chunk(update.id, 0, body, len(body))
        assert (refused.value.kind, refused.value.status) == (kind, status)
        assert client.update(update.id).chunks == {}


def _put(server: Server, id: str, body: bytes, **headers: str) -> httpx.Response:
    return httpx.put(
        f"{server.url}/fp8ext/v1/updates/{id}/chunks/0",
        content=body,
        headers={"Authorization": f"Bearer {server.key}", **headers},
        timeout=240,
    )


@pytest.mark.parametrize(
    ("header", "status", "kind"),
    [
        ("sha-256=:{sha}:", 200, None),
        ("unixsum=:AAAA:, sha-256=:{sha}:", 200, None),
        ("sha-256=:AAAA:", 400, "digest-mismatch"),
        ("sha-256={sha}", 400, "invalid-digest"),
        ("md5=:AAAA:", 400, "invalid-digest"),
    ],
)
def test_content_digests(unchanged: Server, header: str, status: int, kind: str | None):
    body = (LATE / "model.safetensors").read_bytes()
    sha = base64.b64encode(hashlib.sha256(body).digest()).decode()
    with unchanged.client() as client:
        update = client.open()
        reply = _put(unchanged, update.id, body, **{"Content-Digest": header.format(sha=sha)})
        assert reply.status_code == status, reply.text
        if kind:
            assert reply.json()["type"] == f"urn:fp8ext:problem:{kind}"
            assert client.update(update.id).chunks == {}


def test_claims(unchanged: Server):
    """What was said of the tensors beforehand is checked: at once as far as it can be, and their contents as they come."""
    body = (LATE / "model.safetensors").read_bytes()
    tensors = load_file(LATE / "model.safetensors")
    right = {
        name: TensorClaim(
            shape=list(tensor.shape),
            dtype="bfloat16",
            sha256=hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
        )
        for name, tensor in tensors.items()
    }
    wrong = {NORM: TensorClaim(shape=[3]), "model.extra": TensorClaim(), Q_PROJ: TensorClaim(dtype="int8")}
    with unchanged.client() as client:
        with pytest.raises(UpdateError) as refused:
            client.open(tensors=wrong)
        assert (refused.value.kind, refused.value.status) == ("invalid-tensors", 422)
        assert {problem["kind"] for problem in refused.value.details["problems"]} == {
            "wrong-shape",
            "unknown-tensor",
            "wrong-dtype",
        }
        update = client.open(tensors=right)
        client.put_chunk(update.id, 0, body, len(body))
        client.abandon(update.id)
        for name in (NORM, Q_PROJ):
            update = client.open(tensors=right | {name: TensorClaim(sha256="0" * 64)})
            with pytest.raises(UpdateError) as refused:
                client.put_chunk(update.id, 0, body, len(body))
            assert (refused.value.kind, refused.value.status) == ("sha256-mismatch", 422)
            assert [problem["tensor"] for problem in refused.value.details["problems"]] == [name]
            client.abandon(update.id)
        update = client.open(tensors={NORM: TensorClaim(dtype="float32")})
        with pytest.raises(UpdateError, match="wrong-dtype"):
            client.put_chunk(update.id, 0, body, len(body))


def test_a_client_that_goes_away_in_mid_body(unchanged: Server):
    body = (LATE / "model.safetensors").read_bytes()
    with unchanged.client() as client:
        update = client.open()
        head = (
            f"PUT /fp8ext/v1/updates/{update.id}/chunks/0 HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: Bearer {unchanged.key}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", unchanged.port)) as connection:
            connection.sendall(head.encode() + body[: len(body) // 2])
        assert client.update(update.id).chunks == {}
        assert client.put_chunk(update.id, 0, body, len(body)).tensors_missing == 0


def test_a_file_that_changes_while_it_is_read(unchanged: Server, spoiled: Callable[..., Path]):
    path = spoiled("changing")
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(0.001):
            os.utime(path)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        with unchanged.client() as client:
            # a busy machine may let nobody touch it while it is read
            refused = next(filter(None, (_refusal(client, path) for _ in range(20))))
    finally:
        stop.set()
        toucher.join()
    assert (refused.kind, refused.status) == ("file-changed", 409)


def _refusal(client: Client, path: Path) -> UpdateError | None:
    """Why a file could not be staged."""
    id = client.open().id
    try:
        client.files(id, path)
    except UpdateError as error:
        return error
    finally:
        client.abandon(id)
    return None


def test_a_wrong_base(unchanged: Server):
    with unchanged.client() as client:
        epoch = client.weights().epoch
        with pytest.raises(UpdateError) as refused:
            client.open(base_epoch=epoch + 1)
        assert (refused.value.kind, refused.value.status) == ("stale-base", 409)
        assert refused.value.details == {"expected": epoch + 1, "found": epoch}


@FIRST
def test_chunks_in_any_order_in_parallel_and_repeated(server: Server):
    """Sixteen chunks over four connections, each sent twice, the last first."""
    parts = list(enumerate(bodies(ranges_of(LATE), 1 << 18)))
    assert len(parts) > 8
    with server.client() as client:
        manifest = Manifest.from_dict(client.manifest())
        update = client.open(version="late")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda part: client.put_chunk(update.id, *part), [*reversed(parts), *parts]))
        assert client.update(update.id).tensors_missing == 0
        client.commit(update.id)
        assert client.digests().digests == checkpoint_digests(LATE, manifest)


@FIRST
def test_a_refused_chunk_can_be_sent_again(server: Server):
    bad = save(_with(NORM, lambda t: _poked(t, torch.nan)))
    good = (LATE / "model.safetensors").read_bytes()
    with server.client() as client:
        update = client.open(version="late")
        with pytest.raises(UpdateError, match="non-finite"):
            client.put_chunk(update.id, 0, bad, len(bad))
        client.put_chunk(update.id, 0, good, len(good))
        assert client.commit(update.id).result["version"] == "late"


def test_a_tensor_in_two_chunks(unchanged: Server):
    body = save({NORM: torch.ones(256, dtype=torch.bfloat16)})
    with unchanged.client() as client:
        update = client.open()
        client.put_chunk(update.id, 0, body, len(body))
        with pytest.raises(UpdateError) as refused:
            client.put_chunk(update.id, 1, body, len(body))
        assert refused.value.kind == "duplicate-tensor"


@pytest.mark.parametrize(
    ("key", "status", "kind"), [(None, 401, "no-key"), ("", 401, "no-key"), ("wrong", 403, "wrong-key")]
)
def test_keys(unchanged: Server, key, status, kind, monkeypatch):
    monkeypatch.delenv("FP8EXT_ADMIN_KEY", raising=False)
    with Client(unchanged.url, key) as client:
        for call in (client.weights, client.manifest, client.digests, client.open, client.rollback):
            with pytest.raises(UpdateError) as refused:
                call()
            assert (refused.value.status, refused.value.kind) == (status, kind)
        with pytest.raises(UpdateError) as refused:
            client.put_chunk("any", 0, b"x", 1)
        assert refused.value.status == status


def test_no_key_beats_a_bad_body(unchanged: Server):
    reply = httpx.post(f"{unchanged.url}/fp8ext/v1/updates", content=b"{not json", timeout=120)
    assert reply.status_code == 401
    assert reply.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "how",
    [
        "outside",
        "parent",
        "link",
        "dangling",
        "missing",
        "linked file",
        "linked index",
        "long name",
        "circle",
    ],
)
def test_paths(unchanged: Server, how: str, folder: Path, tmp_path: Path):
    inside = folder / "paths"
    inside.mkdir(exist_ok=True)
    link, linked, index = inside / "link", inside / "linked" / "model.safetensors", inside / "index" / INDEX
    (tmp_path / "secret").touch()
    for file in (linked, index):
        file.parent.mkdir(exist_ok=True)
    dangling, circle = inside / "dangling", inside / "circle"
    targets = {link: LATE, linked: LATE / "model.safetensors", index: tmp_path / "secret", circle: circle}
    for path, target in (targets | {dangling: Path("/no/such/checkpoint")}).items():
        if not path.is_symlink():
            path.symlink_to(target)
    path, kind, status = {
        "outside": (LATE, "path-not-allowed", 403),
        "parent": (f"{folder}/../{tmp_path.name}", "path-not-allowed", 403),
        "link": (link, "path-not-allowed", 403),
        "linked file": (linked.parent, "path-not-allowed", 403),
        "linked index": (index.parent, "path-not-allowed", 403),
        "dangling": (dangling, "path-not-allowed", 403),
        "missing": (folder / "nothing-here", "not-found", 404),
        "long name": (folder / ("x" * 256) / "step-1", "not-found", 404),
        "circle": (circle, "path-not-allowed", 403),
    }[how]
    with unchanged.client() as client:
        with pytest.raises(UpdateError) as refused:
            client.load(path)
        assert (refused.value.kind, refused.value.status) == (kind, status)
        assert client.weights().update is None


def test_wrong_states(unchanged: Server):
    with unchanged.client() as client:
        update = client.open(id="mine")
        assert client.open(id="mine") == update
        for other in ({"version": "another"}, {"base_epoch": 99}, {"partial": True}):
            with pytest.raises(UpdateError, match="was opened with") as refused:
                client.push(LATE, id="mine", **other)
            assert (refused.value.kind, refused.value.status) == ("other-update", 409)
        with pytest.raises(UpdateError) as refused:
            client.open()
        assert (refused.value.kind, refused.value.status) == ("update-open", 409)
        with pytest.raises(UpdateError) as refused:
            client.commit("mine")
        assert refused.value.kind == "incomplete"
        assert client.abandon("mine").state == "abandoned"
        assert client.abandon("mine").state == "abandoned"
        for call in (client.prepare, client.commit):
            with pytest.raises(UpdateError) as refused:
                call("mine")
            assert (refused.value.kind, refused.value.status) == ("wrong-state", 409)
        with pytest.raises(UpdateError) as refused:
            client.update("unknown")
        assert refused.value.status == 404


def test_bad_requests(unchanged: Server):
    headers = {"Authorization": f"Bearer {unchanged.key}"}
    for body in ({"nope": 1}, {"running": "sometimes"}, {"version": ""}, {"base_epoch": -1}, [], "x"):
        reply = httpx.post(f"{unchanged.url}/fp8ext/v1/updates", json=body, headers=headers, timeout=120)
        assert reply.status_code == 422, reply.text
        assert reply.json()["type"] == "urn:fp8ext:problem:invalid-request"
