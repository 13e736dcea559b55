# SPDX-License-Identifier: Apache-2.0
"""Every bad update is refused with its own problem, and leaves the served model bit for bit as it was."""

import json
import struct
from collections.abc import Callable
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

from .ask import state

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def unchanged(server: Server):
    """Fails when the test has changed anything that is served."""
    before = state(server)
    yield server
    with server.client() as client:
        open_update = client.weights().update
        if open_update:
            client.abandon(open_update)
    assert state(server) == before


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
    "several at once": (
        "invalid-tensors",
        lambda: _with(Q_PROJ, lambda t: t[:1]) | {"model.extra": torch.ones(3)},
        "model.extra",
    ),
}


@pytest.mark.parametrize("case", BODIES)
def test_bad_tensors(unchanged: Server, case: str):
    kind, make, named = BODIES[case]
    body = save(make())
    with unchanged.client() as client:
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


def _lying(data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header[Q_PROJ]["data_offsets"][1] += 64
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data[:-100],
        lambda data: data + b"more",
        lambda data: b"not safetensors at all, but long enough to look at",
        lambda data: struct.pack("<Q", 1 << 40) + data[8:],
        lambda data: b"",
        _lying,
    ],
    ids=["truncated", "trailing bytes", "garbage", "header too long", "empty", "header lies about offsets"],
)
def test_broken_safetensors(unchanged: Server, edit):
    body = _broken(edit)
    with unchanged.client() as client:
        update = client.open()
        with pytest.raises(UpdateError) as refused:
            client.put_chunk(update.id, 0, body, len(body))
        assert (refused.value.kind, refused.value.status) == ("broken-safetensors", 422)
        assert client.update(update.id).chunks == {}


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
    reply = httpx.post(f"{unchanged.url}/fp8ext/v1/updates", content=b"{not json", timeout=10)
    assert reply.status_code == 401
    assert reply.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("how", ["outside", "parent", "link", "missing", "linked file"])
def test_paths(unchanged: Server, how: str, folder: Path, tmp_path: Path):
    inside = folder / "paths"
    inside.mkdir(exist_ok=True)
    link, linked = inside / "link", inside / "linked" / "model.safetensors"
    linked.parent.mkdir(exist_ok=True)
    for path, target in ((link, LATE), (linked, LATE / "model.safetensors")):
        if not path.is_symlink():
            path.symlink_to(target)
    path, kind, status = {
        "outside": (LATE, "path-not-allowed", 403),
        "parent": (f"{folder}/../{tmp_path.name}", "path-not-allowed", 403),
        "link": (link, "path-not-allowed", 403),
        "linked file": (linked.parent, "path-not-allowed", 403),
        "missing": (folder / "nothing-here", "not-found", 404),
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
        reply = httpx.post(f"{unchanged.url}/fp8ext/v1/updates", json=body, headers=headers, timeout=10)
        assert reply.status_code == 422, reply.text
        assert reply.json()["type"] == "urn:fp8ext:problem:invalid-request"


def test_partial_updates_are_not_there_yet(unchanged: Server):
    headers = {"Authorization": f"Bearer {unchanged.key}"}
    reply = httpx.post(
        f"{unchanged.url}/fp8ext/v1/updates", json={"partial": True}, headers=headers, timeout=10
    )
    assert (reply.status_code, reply.json()["type"]) == (422, "urn:fp8ext:problem:unsupported")
