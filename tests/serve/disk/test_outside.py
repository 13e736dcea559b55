# SPDX-License-Identifier: Apache-2.0
"""Nothing outside the allowed folders is opened or told, whatever leads there and whenever it is put in place."""

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_fp8ext.update.contract import open_beneath as beneath
from vllm_fp8ext.update.contract.checkpoint_files import INDEX

from .server import DiskServer

SECRET = b"TOPSECRT" * 512
_OPEN, _ACCESS, _NONBLOCK = 0x20, 0x01, 0x800
EXCHANGE = """
import ctypes, sys
renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
one, other = (ctypes.c_char_p(path.encode()) for path in sys.argv[1:])
count = 0
while True:
    if renameat2(-100, one, -100, other, 2):
        sys.exit(ctypes.get_errno())
    count += 1
    if count == 1:
        print("exchanging", flush=True)
"""
"""Exchanges two paths again and again."""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(SECRET)
    return folder


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed" / "step-1"
    folder.mkdir(parents=True)
    save_file({name: torch.ones(2) for name in "ab"}, folder / "model.safetensors")
    return folder.parent


@pytest.fixture
def server(allowed: Path) -> Iterator[DiskServer]:
    server = DiskServer(allowed)
    yield server
    server.backend.bodies.close()


@contextmanager
def unopened(*paths: Path) -> Iterator[None]:
    """Nobody opens or reads one of these meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(_NONBLOCK)
    assert watch >= 0
    try:
        for path in paths:
            assert libc.inotify_add_watch(watch, os.fsencode(path), _OPEN | _ACCESS) >= 0
        yield
        with suppress(BlockingIOError):
            event = os.read(watch, 4096)
            pytest.fail(f"opened: {paths[struct.unpack_from('i', event)[0] - 1]}")
    finally:
        os.close(watch)


@contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """Another process exchanges two paths without a break."""
    line = [sys.executable, "-c", EXCHANGE, str(one), str(other)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "exchanging\n":
                pytest.skip(f"this file system exchanges no paths: {os.strerror(process.wait())}")
            yield
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("named", "way"),
    [
        ("its folder", "openat2"),
        pytest.param("its folder", "step by step", marks=pytest.mark.full),
        pytest.param("the file", "openat2", marks=pytest.mark.full),
        ("the file", "step by step"),
    ],
)
def test_a_folder_that_is_exchanged_with_a_link_to_outside(
    server: DiskServer, allowed: Path, outside: Path, named: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While calls run: each loads what is allowed, or tells nothing."""
    if way == "step by step":
        monkeypatch.setattr(beneath, "_has_openat2", lambda: False)
    link = allowed / "link"
    link.symlink_to(outside)
    path = allowed / "step-1" / ("" if named == "its folder" else "model.safetensors")
    answers = set()
    secret = str(int.from_bytes(SECRET[:8], "little"))
    with unopened(outside, outside / "model.safetensors"), exchanging(allowed / "step-1", link):
        for _ in range(150):
            answer = server.post("/load", path=str(path))
            told = answer.json()
            answers.add((answer.status_code, told.get("type", "").rpartition(":")[2]))
            assert secret not in answer.text
            assert str(len(SECRET) - 8) not in told.get("detail", "").split()
    assert answers <= {(200, ""), (403, "path-not-allowed"), (404, "not-found"), (409, "file-changed")}


TARGETS = {
    "a file": "outside/model.safetensors",
    "nothing": "outside/missing.safetensors",
    "a folder": "outside",
    "a circle": "outside/circle",
    "below a file": "outside/model.safetensors/x",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("what", ["a file", "one that the index names", "the index"])
def test_a_link_in_a_folder_to_outside_is_answered_alike(
    server: DiskServer, allowed: Path, outside: Path, what: str, target: str
) -> None:
    (outside / "circle").symlink_to("circle")
    name = INDEX if what == "the index" else "model-2.safetensors"
    link = allowed / "step-1" / name
    link.symlink_to(allowed.parent / TARGETS[target])
    if what == "one that the index names":
        (allowed / "step-1" / INDEX).write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    with unopened(outside, outside / "model.safetensors"):
        answer = server.post("/load", path=str(allowed / "step-1"))
    assert answer.status_code == 403
    assert answer.json() == {
        "type": "urn:fp8ext:problem:path-not-allowed",
        "title": "path not allowed",
        "status": 403,
        "detail": f"{link} does not lead to a folder in allowed_dirs",
    }


@pytest.mark.parametrize("content", [SECRET, b"\x10" + bytes(7) + SECRET, b'{"TOPSECRT": 1}'])
def test_what_a_file_holds_that_is_no_checkpoint_is_told_to_nobody(
    server: DiskServer, allowed: Path, content: bytes
) -> None:
    (allowed / "notes.txt").write_bytes(content)
    answer = server.post("/load", path=str(allowed / "notes.txt"))
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:fp8ext:problem:broken-safetensors")
    assert "notes.txt: not a valid safetensors file" in answer.json()["detail"]
    assert "TOPSECRT" not in answer.text
    told = answer.text.replace("422", "").replace(str(allowed), "")
    assert str(int.from_bytes(content[:8], "little")) not in told
