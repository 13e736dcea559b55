# SPDX-License-Identifier: Apache-2.0
"""The file of a benchmark's cases."""

import json
import os
import sys
from pathlib import Path

import pytest

from vllm_fp8ext.bench.provenance import provenance, write_cases


def test_cases_stand_under_where_they_come_from(tmp_path: Path) -> None:
    file, origin = tmp_path / "new" / "found.json", provenance()
    for cases in ([{"us": 1.0}], [{"us": 1.0}, {"us": 2.0}]):
        write_cases(file, origin, cases, copy_gbps=3.0)
        assert json.loads(file.read_text()) == {"provenance": origin, "copy_gbps": 3.0, "cases": cases}
    write_cases(None, origin, [])
    assert list(tmp_path.iterdir()) == [file.parent]


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("/venv/bin/fp8ext", "fp8ext a 'b c'"),
        ("/site/vllm_fp8ext/cli.py", "fp8ext a 'b c'"),
        ("benchmarks/x.py", "python benchmarks/x.py a 'b c'"),
    ],
)
def test_a_command_is_told_as_it_is_typed(monkeypatch: pytest.MonkeyPatch, program: str, told: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, "a", "b c"])
    assert provenance()["command"] == told


def test_settings_are_told_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"VLLM_DEEP_GEMM_WARMUP": "skip", "DG_JIT_DEBUG": "1"}
    untold = {"VLLM_API_KEY": "a", "VLLM_CACHE_ROOT": "/home/me", "FP8EXT_ADMIN_KEY": "b", "HOME": "c"}
    for name in [name for name in os.environ if name.startswith(("VLLM_", "DG_"))]:
        monkeypatch.delenv(name)
    for name, value in (told | untold).items():
        monkeypatch.setenv(name, value)
    assert provenance()["environment"] == told


@pytest.mark.parametrize(("visible", "told"), [(None, ["0", "1", "2"]), ("2", ["2"]), ("0,1", ["0", "1"])])
def test_gpus_and_cores_are_those_that_a_run_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, told: list[str]
) -> None:
    """This `nvidia-smi` knows three GPUs, by their numbers."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nids=0,1,2\nfor word; do case $word in --id=*) ids=${word#--id=};; esac; done\n"
        'echo $ids | tr , "\\n"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, list(before)[:1])
    try:
        origin = provenance()
    finally:
        os.sched_setaffinity(0, before)
    assert origin["gpus"] == told
    assert origin["cpu"].startswith("1 x ")
