# SPDX-License-Identifier: Apache-2.0
"""Tile registers of a CPU: a process that did not ask for them ends at the first instruction that uses one."""

import subprocess
import sys

import pytest
import torch

AMX = torch.cpu._is_amx_tile_supported()
GRANTED = """
import ctypes
found = ctypes.c_ulong()
assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(found)) == 0  # arch_prctl(ARCH_GET_XCOMP_PERM)
print(bool(found.value >> 18 & 1))  # XTILEDATA
"""


def granted(before: str = "") -> bool:
    """Whether a process of its own may use them after this."""
    line = [sys.executable, "-P", "-c", before + GRANTED]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()[-1] == "True"


@pytest.mark.skipif(not AMX, reason="a CPU without tile registers")
def test_they_are_asked_for() -> None:
    assert not granted()
    assert granted("from vllm_fp8ext.compat.warmup.cpu_tiles import allow; allow(); allow()")


def test_a_cpu_without_them_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fp8ext.compat.warmup import cpu_tiles

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: pytest.fail("asked"))
    cpu_tiles.allow()
