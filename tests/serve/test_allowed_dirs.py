# SPDX-License-Identifier: Apache-2.0
"""Where paths lead, and that nobody learns what lies outside the allowed folders."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.allowed_dirs import PATH_BYTES, AllowedDirs
from vllm_fp8ext.update.contract.regular_file import path_error


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """One of two allowed folders, with a checkpoint in it; `outside` is beside them."""
    for folder in ("allowed/step-1", "second/step-2", "outside/hidden"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").touch()
    return tmp_path / "allowed"


@pytest.fixture
def dirs(allowed: Path) -> AllowedDirs:
    return AllowedDirs([str(allowed), str(allowed.parent / "second")])


def refused(dirs: AllowedDirs, path: str | Path) -> tuple[str, int, str]:
    with pytest.raises(UpdateError) as caught:
        dirs.resolve(str(path))
    return caught.value.kind, caught.value.status, str(caught.value)


def not_allowed(path: str | Path) -> tuple[str, int, str]:
    return "path-not-allowed", 403, f"{path} does not lead to a folder in allowed_dirs"


def test_links_that_end_in_an_allowed_folder_are_followed(
    dirs: AllowedDirs, allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, other = allowed / "step-1", allowed.parent / "second" / "step-2"
    links = {
        allowed / "latest": step,
        allowed / "relative": Path("step-1"),
        allowed / "twice": allowed / "latest",
        allowed / "elsewhere": other,
        allowed / "through": Path("../outside/back/step-1"),
        allowed.parent / "outside" / "back": Path("../allowed"),
        allowed.parent / "data": allowed,
    }
    for link, target in links.items():
        link.symlink_to(target)
    for path in ("latest", "relative", "twice", "through", "../allowed/step-1", "./latest//", "latest/."):
        resolved = dirs.resolve(str(allowed / path) + "/")
        assert (resolved.path, resolved.folder) == (str(step), str(allowed)), path
    assert dirs.resolve(str(allowed.parent / "data" / "step-1")).path == str(step)
    assert dirs.resolve(str(allowed)).path == str(allowed)
    resolved = dirs.resolve(str(allowed / "elsewhere"))
    assert (resolved.path, resolved.folder) == (str(other), str(other.parent))
    monkeypatch.chdir(allowed.parent / "outside" / "hidden")
    assert dirs.resolve("../../allowed/latest").path == str(step)


def test_an_allowed_folder_may_be_named_by_a_link_and_may_be_all(allowed: Path) -> None:
    (allowed.parent / "data").symlink_to(allowed)
    assert AllowedDirs([str(allowed.parent / "data")]).resolve(str(allowed / "step-1")).folder == str(allowed)
    assert AllowedDirs(["/"]).resolve(str(allowed)).folder == "/"


def test_a_folder_whose_name_begins_alike_is_outside(dirs: AllowedDirs, allowed: Path) -> None:
    (allowed.parent / "allowed-2").mkdir()
    path = allowed.parent / "allowed-2"
    assert refused(dirs, path) == not_allowed(path)
    assert refused(AllowedDirs(), path) == not_allowed(path)


TARGETS = {
    "a folder": "hidden",
    "a file": "hidden/model.safetensors",
    "nothing": "missing",
    "nothing in nothing": "missing/model.safetensors",
    "below a file": "hidden/model.safetensors/x",
    "a circle": "circle",
    "a name that is too long": "x" * 256,
    "a link to nothing": "dangling",
    "out of a folder and in": "hidden/../../allowed/step-1",
    "out of nothing and in": "missing/../../allowed/step-1",
    "out of a file and in": "hidden/model.safetensors/../../../allowed/step-1",
}


@pytest.mark.parametrize("by", ["path", "absolute link", "relative link", "link to its folder"])
@pytest.mark.parametrize("target", TARGETS)
def test_whatever_lies_outside_is_answered_alike(
    dirs: AllowedDirs, allowed: Path, target: str, by: str
) -> None:
    outside = allowed.parent / "outside"
    (outside / "circle").symlink_to("circle")
    (outside / "dangling").symlink_to("/no/such")
    link, relative = allowed / "link", os.path.join("..", "outside", TARGETS[target])
    path = link
    match by:
        case "path":
            path = Path(os.path.join(outside, TARGETS[target]))
        case "absolute link":
            link.symlink_to(os.path.join(outside, TARGETS[target]))
        case "relative link":
            link.symlink_to(relative)
        case "link to its folder":
            link.symlink_to(outside)
            path = Path(os.path.join(link, TARGETS[target]))
    assert refused(dirs, path) == not_allowed(path)


def test_a_circle_of_links_leads_nowhere(dirs: AllowedDirs, allowed: Path) -> None:
    (allowed / "a").symlink_to("b")
    (allowed / "b").symlink_to(allowed / "a")
    assert refused(dirs, allowed / "a") == not_allowed(allowed / "a")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing", "No such file"),
        ("missing/deeper", "No such file"),
        ("step-1/model.safetensors/x", "Not a dir"),
        ("x" * 256, "File name too long"),
        ("step-1/" + "é" * 128 + "/x", "File name too long"),
        ("dangling", "No such file"),
    ],
)
def test_what_an_allowed_folder_does_not_have(dirs: AllowedDirs, allowed: Path, path: str, said: str) -> None:
    (allowed / "dangling").symlink_to("gone")
    kind, status, message = refused(dirs, allowed / path)
    assert (kind, status) == ("not-found", 404)
    assert message.startswith(f"{allowed / path}: {said}")


@pytest.mark.parametrize("path", ["", "/a\0b", "/\ud800", "/" * (PATH_BYTES + 1), "é/" * 1400])
def test_what_can_be_no_path(dirs: AllowedDirs, path: str) -> None:
    kind, status, message = refused(dirs, path)
    assert (kind, status) == ("invalid-request", 422)
    assert message.startswith("path: expected")
    message.encode()


def test_a_long_path_is_followed_to_where_it_leads(dirs: AllowedDirs, allowed: Path) -> None:
    path = str(allowed / "step-1")
    longest = path + "/." * ((PATH_BYTES - len(path)) // 2)
    assert dirs.resolve(longest).path == path


@pytest.mark.parametrize("name", ["model.safetensors", "missing"])
def test_a_folder_that_becomes_a_link_while_it_is_looked_at_tells_nothing(
    dirs: AllowedDirs, allowed: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that there is something of that name where the link leads, nor that there is not."""
    readlink = os.readlink

    def read(path: str) -> str:
        if path.endswith(name):
            (allowed / "step-1").rename(allowed / "away")
            (allowed / "step-1").symlink_to(allowed.parent / "outside" / "hidden")
        return readlink(path)

    monkeypatch.setattr(os, "readlink", read)
    path = str(allowed / "step-1" / name)

    def opened() -> None:
        try:
            os.close(dirs.resolve(path).open(os.O_PATH))
        except OSError as error:
            raise path_error(path, error) from None

    with pytest.raises(UpdateError) as caught:
        opened()
    assert (caught.value.kind, caught.value.status) == ("file-changed", 409)
    assert str(caught.value) == f"{path} was changed before it was read"


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that nobody but root may enter, where everybody may enter those that it lies in."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "closed"
        (path / "deep").mkdir(parents=True)
        path.chmod(0o600)
        path.parent.chmod(0o755)
        yield path


def test_a_folder_that_may_not_be_entered(closed: Path) -> None:
    """Root may enter any, so somebody else asks."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            if not os.getuid():
                os.setuid(65534)
            asked = (AllowedDirs([folder]) for folder in (str(closed.parent), "/elsewhere"))
            os.write(writing, repr([refused(dirs, closed / "deep") for dirs in asked]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        told = answer.read()
    inside = ("unreadable", 422, f"{closed / 'deep'}: Permission denied")
    assert told == repr([inside, not_allowed(closed / "deep")])
