# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on the server's disk that change while they are read: served whole, or not at all."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save

from vllm_fp8ext.update.contract.checkpoint_files import INDEX

from .server import DiskServer

OLD, NEW = [1.0, 1.0], [2.0, 2.0]
WHOLE = {"a": OLD, "b": OLD}


def body(name: str, values: list[float]) -> bytes:
    return save({name: torch.tensor(values)})


def checkpoint(folder: Path, values: list[float], *, indexed: bool = True) -> Path:
    """Two files with a tensor each, and their index."""
    folder.mkdir(parents=True)
    for name in "ab":
        (folder / f"model-{name}.safetensors").write_bytes(body(name, values))
    if indexed:
        names = {name: f"model-{name}.safetensors" for name in "ab"}
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "step-1", OLD)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DiskServer]:
    server = DiskServer(tmp_path)
    yield server
    server.backend.bodies.close()


def kind(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:fp8ext:problem:")


def replaced(file: Path) -> None:
    """As a trainer does that writes beside and renames."""
    other = file.with_suffix(".tmp")
    other.write_bytes(body("a", NEW))
    other.rename(file)


def rewritten(file: Path) -> None:
    """In place, with the time set back."""
    status = file.stat()
    file.write_bytes(body("a", NEW))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def removed(file: Path) -> None:
    file.unlink()


def linked(file: Path) -> None:
    file.rename(file.with_suffix(".old"))
    file.symlink_to(file.with_suffix(".old"))


def index_rewritten(file: Path) -> None:
    index = file.parent / INDEX
    index.write_text(index.read_text() + " ")


def index_removed(file: Path) -> None:
    (file.parent / INDEX).unlink()


def another_folder(file: Path) -> None:
    file.parent.rename(file.parent.with_suffix(".old"))
    checkpoint(file.parent, NEW)


CHANGES = (replaced, rewritten, removed, linked, index_rewritten, index_removed, another_folder)
changes = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


def after_the_first(server: DiskServer, change: Callable[[Path], None]) -> None:
    """Change what has been read to its end already."""
    first: list[Path] = []

    def after(path: Path) -> None:
        if not first:
            first.append(path)
            change(path)

    server.ranks.after = after


def test_a_folder_that_rests_is_served(server: DiskServer, step: Path) -> None:
    answer = server.post("/load", path=str(step), version="one")
    assert (answer.status_code, answer.json()["result"]["version"]) == (200, "one")
    assert server.ranks.served == WHOLE
    assert sorted(answer.json()["chunks"]) == [str(step / f"model-{name}.safetensors") for name in "ab"]


@changes
def test_a_folder_of_which_a_file_that_was_read_changes_is_not_served(
    server: DiskServer, step: Path, change: Callable[[Path], None]
) -> None:
    after_the_first(server, change)
    answer = server.post("/load", path=str(step))
    assert kind(answer) == (409, "file-changed")
    assert str(step) in answer.json()["detail"]
    assert server.ranks.served == {}


@changes
def test_what_was_staged_of_a_folder_that_changed_counts_as_not_sent(
    server: DiskServer, step: Path, change: Callable[[Path], None]
) -> None:
    """Nobody can commit it, nor complete it with a file of the later folder."""
    after_the_first(server, change)
    id = server.post("/updates").json()["id"]
    assert kind(server.post(f"/updates/{id}/files", path=str(step))) == (409, "file-changed")
    refused = server.post(f"/updates/{id}/commit")
    assert kind(refused) == (422, "incomplete")
    assert refused.json()["missing"] == ["a", "b"]
    assert {problem["kind"] for problem in refused.json()["problems"]} == {"file-changed"}
    assert server.ranks.served == {}
    whole = checkpoint(step.parent / "step-2", NEW)
    assert server.post(f"/updates/{id}/files", path=str(whole)).status_code == 200
    assert server.post(f"/updates/{id}/commit").status_code == 200
    assert server.ranks.served == {"a": NEW, "b": NEW}


@pytest.mark.parametrize("name", ["model-b.safetensors", "model-c.safetensors", INDEX])
def test_a_folder_without_an_index_that_gets_another_file(
    server: DiskServer, tmp_path: Path, name: str
) -> None:
    """Whoever is still writing it has not written its index yet."""
    folder = checkpoint(tmp_path / "step-3", OLD, indexed=False)
    after_the_first(server, lambda path: [(folder / name).write_text("{}")])
    assert kind(server.post("/load", path=str(folder))) == (409, "file-changed")


def test_a_link_that_moves_meanwhile_is_resolved_once(server: DiskServer, step: Path) -> None:
    other = checkpoint(step.parent / "step-2", NEW)
    latest = step.parent / "latest"
    latest.symlink_to(step)

    def move(path: Path) -> None:
        latest.unlink()
        latest.symlink_to(other)

    after_the_first(server, move)
    assert server.post("/load", path=str(latest)).status_code == 200
    assert server.ranks.served == WHOLE
    assert server.post("/load", path=str(latest)).status_code == 200
    assert server.ranks.served == {"a": NEW, "b": NEW}


def hub_cache(folder: Path) -> tuple[Path, dict[str, Path]]:
    """As `huggingface_hub` lays a model out: a snapshot whose files are relative links to blobs."""
    root = folder / "hub" / "models--org--name"
    snapshot, blobs = root / "snapshots" / "0abc", root / "blobs"
    checkpoint(blobs, OLD)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(blobs.iterdir())):
        blob = file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot, {file.name: file.resolve() for file in snapshot.iterdir()}


def test_a_hub_cache_is_read_through_its_links(server: DiskServer, tmp_path: Path) -> None:
    snapshot, _ = hub_cache(tmp_path)
    assert server.post("/load", path=str(snapshot)).status_code == 200
    assert server.ranks.served == WHOLE


@pytest.mark.parametrize("how", ["another link", "another blob"])
def test_a_hub_cache_that_changes_is_not_served(server: DiskServer, tmp_path: Path, how: str) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    link = snapshot / "model-a.safetensors"

    def change(path: Path) -> None:
        if how == "another link":
            (snapshot / "new").write_bytes(body("a", NEW))
            link.unlink()
            link.symlink_to("new")
        else:
            replaced(blobs["model-a.safetensors"])

    after_the_first(server, change)
    assert kind(server.post("/load", path=str(snapshot))) == (409, "file-changed")
    assert server.ranks.served == {}


@pytest.mark.parametrize("route", ["/load", "/updates/{id}/files"])
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("x" * 256, 404),
        ("x" * 256 + "/step-1", 404),
        ("d/" * 2000, 404),
        ("step-1/" * 1500, 422),
        ("é" * 2500, 422),
        ("step-1\0", 422),
        ("step-1\ud800", 422),
        ("circle", 403),
        ("pipe", 422),
        ("dangling", 404),
        ("step-1/" + INDEX + "/x", 404),
    ],
    ids=lambda value: f"{value!r:.12}" if isinstance(value, str) else None,
)
def test_paths_that_lead_nowhere(
    server: DiskServer, step: Path, route: str, path: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each answer says what is wrong; none is an unexpected error."""
    (step.parent / "circle").symlink_to("circle")
    (step.parent / "dangling").symlink_to("gone")
    os.mkfifo(step.parent / "pipe")
    id = server.post("/updates").json()["id"]
    if route == "/load":
        server.backend.engine._engine.handle("abandon", {"id": id})  # type: ignore[attr-defined]
    answer = server.post(route.format(id=id), path=f"{step.parent}/{path}")
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert not caplog.records


@pytest.mark.parametrize("how", ["a file", "a link to one", "in the index"])
def test_names_that_are_no_text(server: DiskServer, tmp_path: Path, how: str) -> None:
    """Nobody could be told of them, neither ranks nor clients."""
    folder = checkpoint(tmp_path / "step-4", OLD, indexed=False)
    odd = os.fsencode(folder) + b"/model-\xff.safetensors"
    if how == "in the index":
        (folder / INDEX).write_text('{"weight_map": {"a": "\\ud800"}}')
    else:
        (folder / "model-b.safetensors").rename(os.fsdecode(odd))
    if how == "a link to one":
        Path(os.fsdecode(odd)).rename(os.fsdecode(odd) + ".old")
        (folder / "model-b.safetensors").symlink_to(os.fsdecode(odd) + ".old")
    answer = server.post("/load", path=str(folder))
    assert answer.status_code == (404 if how == "in the index" else 422), answer.text
    assert answer.json()["type"] != "urn:fp8ext:problem:incomplete"


def test_a_file_that_is_gone_when_its_turn_comes(server: DiskServer, step: Path) -> None:
    after_the_first(server, lambda path: (step / "model-b.safetensors").unlink())
    assert kind(server.post("/load", path=str(step / "model-a.safetensors"))) == (422, "incomplete")
    assert kind(server.post("/load", path=str(step))) == (404, "not-found")
