# SPDX-License-Identifier: Apache-2.0
"""Which worker of the engines that lend has the memory for K and V; that they do so on a GPU: tests/gpu/test_engines.py."""

import fcntl
from pathlib import Path

import pytest
from vllm.v1.worker import gpu_worker

from vllm_fp8ext.bench.engines import LENDS
from vllm_fp8ext.bench.lending import Worker


def test_a_worker_has_the_file_from_its_first_k_and_v_on_but_while_it_lends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "memory", []
    monkeypatch.setenv(LENDS, str(file))
    for name in ("initialize_from_config", "wake_up", "discard"):  # which allocate and free on a GPU
        monkeypatch.setattr(gpu_worker.Worker, name, lambda *_: seen.append(_is_taken(file)))
    worker = Worker.__new__(Worker)
    worker.initialize_from_config(None)
    assert _is_taken(file)
    worker.discard(("workspace",))
    assert _is_taken(file)
    worker.discard(("kv_cache",))
    assert not _is_taken(file)
    worker.wake_up(["scheduling"])
    assert not _is_taken(file)
    worker.wake_up(["kv_cache", "scheduling"])
    assert _is_taken(file)
    worker.discard(("kv_cache",))
    worker.wake_up()
    assert _is_taken(file)
    assert seen == [True, True, True, False, True, True, True], "while it allocates and frees"


def _is_taken(file: Path) -> bool:
    with file.open("w") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
