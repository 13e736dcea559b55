# SPDX-License-Identifier: Apache-2.0
"""Segments that processes leave behind that are killed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext import shared_memory
from vllm_fp8ext.shared_memory import record, remove_left

MAKER = """
import multiprocessing, os, sys, time
from pathlib import Path
from vllm_fp8ext.shared_memory import record

folder, how, *names = sys.argv[1:]
for name in names:
    Path(folder, name).write_bytes(b"x")
    record(name, folder)
if how == "keeps one":
    Path(folder, names[0]).unlink()
elif how == "forked" and os.fork():
    os._exit(9)
if how in ("waits", "forked"):
    print("made", flush=True)
    input()
if how in ("killed", "waits", "forked"):
    os._exit(9)
for name in names[how == "keeps one":] if how == "removes" else ():
    Path(folder, name).unlink()
"""


def make(folder: Path, how: str, *names: str) -> "subprocess.Popen[str]":
    """A process that makes segments, and ends `how`."""
    line = [sys.executable, "-P", "-c", MAKER, str(folder), how, *names]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if how in ("waits", "forked"):
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
    else:
        process.wait(300)
    return process


def names(folder: Path) -> set[str]:
    """What is there beside records."""
    return {path.name for path in folder.iterdir() if path.suffix != ".segments"}


def records(folder: Path) -> int:
    return len([*folder.glob("*.segments")])


def test_only_segments_of_processes_that_were_killed_are_removed(tmp_path: Path) -> None:
    (tmp_path / "psm_aaaaaaaa").write_bytes(b"somebody's, who writes nothing down")
    alive = make(tmp_path, "waits", "psm_bbbbbbbb")
    with alive, make(tmp_path, "killed", "psm_cccccccc", "psm_dddddddd"):
        assert records(tmp_path) == 2
        remove_left(str(tmp_path))
        assert names(tmp_path) == {"psm_aaaaaaaa", "psm_bbbbbbbb"}
        assert records(tmp_path) == 1
        alive.communicate("\n", timeout=300)
    remove_left(str(tmp_path))
    assert names(tmp_path) == {"psm_aaaaaaaa"}
    assert records(tmp_path) == 0


def test_a_process_that_was_forked_keeps_them(tmp_path: Path) -> None:
    """Workers may have them mapped, and others may be told of them."""
    with make(tmp_path, "forked", "psm_aaaaaaaa") as maker:
        assert maker.wait(300) == 9
        remove_left(str(tmp_path))
        assert names(tmp_path) == {"psm_aaaaaaaa"}
        maker.communicate("\n", timeout=300)
    remove_left(str(tmp_path))
    assert names(tmp_path) == set()


@pytest.mark.parametrize(("how", "left"), [("removes", 0), ("keeps one", 1)])
def test_a_process_that_ends_removes_its_record_unless_it_leaves_segments(
    tmp_path: Path, how: str, left: int
) -> None:
    with make(tmp_path, how, "psm_aaaaaaaa", "psm_bbbbbbbb") as maker:
        assert maker.returncode == 0
    assert (records(tmp_path), len(names(tmp_path))) == (left, left)
    remove_left(str(tmp_path))
    assert [*tmp_path.iterdir()] == []


def test_another_segment_of_the_same_name_stays(tmp_path: Path) -> None:
    with make(tmp_path, "killed", "psm_aaaaaaaa"):
        old = (tmp_path / "psm_aaaaaaaa").rename(tmp_path / "kept")
    (tmp_path / "psm_aaaaaaaa").write_bytes(b"of another")
    remove_left(str(tmp_path))
    assert names(tmp_path) == {"psm_aaaaaaaa", old.name}


@pytest.mark.parametrize("line", ["../outside {}", "outside {}", "psm_/../outside {}", "\xff{}", "psm_x", ""])
def test_nothing_else_is_removed_whatever_a_record_says(tmp_path: Path, line: str) -> None:
    (tmp_path / "inside").mkdir()
    outside = tmp_path / "outside"
    outside.touch()
    (tmp_path / "inside" / "outside").touch()
    (tmp_path / "inside" / "psm_x").touch()
    text = line.format(outside.stat().st_ino)
    (tmp_path / "inside" / "fp8ext-x.segments").write_bytes(f"{text}\n".encode("latin-1"))
    remove_left(str(tmp_path / "inside"))
    assert outside.exists()
    assert names(tmp_path / "inside") == {"outside", "psm_x"}


def test_what_cannot_be_removed_hinders_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    with make(tmp_path, "killed", "psm_aaaaaaaa"):
        monkeypatch.setattr(Path, "unlink", refuse)
        remove_left(str(tmp_path))
        monkeypatch.undo()
    assert (names(tmp_path), records(tmp_path)) == ({"psm_aaaaaaaa"}, 1)


def test_what_another_user_has_written_down_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path, "killed", "psm_aaaaaaaa"):
        pass
    own = os.geteuid()
    monkeypatch.setattr(shared_memory.os, "geteuid", lambda: own + 1)
    remove_left(str(tmp_path))
    assert names(tmp_path) == {"psm_aaaaaaaa"}


def test_a_full_folder_is_the_callers_to_know(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        record("psm_aaaaaaaa", str(tmp_path / "missing"))
