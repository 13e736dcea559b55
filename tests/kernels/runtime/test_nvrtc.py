# SPDX-License-Identifier: Apache-2.0
"""Which NVRTC is taken, what is kept of its work, and what can't be had."""

from pathlib import Path

import pytest

from vllm_fp8ext.kernels.runtime import nvrtc
from vllm_fp8ext.kernels.runtime.cuda_kernel import CudaError
from vllm_fp8ext.kernels.runtime.nvrtc import nvrtc_files


def test_the_newest_comes_first_and_of_one_version_that_of_the_first_folder(tmp_path: Path) -> None:
    names = (
        *("b/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "b/nvidia/cu13/lib/libnvrtc.so.13"),
        *("a/nvidia/cu9/lib/libnvrtc.so.9", "a/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        *("a/nvidia/cu13/lib/libnvrtc-builtins.so.13.0", "a/nvidia/cuda_nvrtc/lib/libnvrtc.so"),
    )
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    result = nvrtc_files([str(tmp_path / folder) for folder in ("b", "none", "a")])
    assert [str(path.relative_to(tmp_path)) for path in result] == [names[1], names[0], names[3], names[2]]


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nvrtc.CACHE, raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert nvrtc._kept("name") == Path("/somewhere/.cache/vllm-fp8ext/name.cubin")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 987654)
    assert nvrtc._kept("name") is None


def test_a_library_that_is_damaged_is_an_error_of_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which those that can do without catch."""
    damaged = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.99"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("no library")
    monkeypatch.syspath_prepend(tmp_path)
    nvrtc._nvrtc.cache_clear()
    with pytest.raises(CudaError, match="NVRTC can't be loaded"):
        nvrtc.compile_source("", {}, {})
