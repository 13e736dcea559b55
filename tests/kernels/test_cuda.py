# SPDX-License-Identifier: Apache-2.0
"""Which NVRTC is taken, and what is said of it."""

from pathlib import Path

import pytest

from vllm_fp8ext.kernels import cuda
from vllm_fp8ext.kernels.cuda import nvrtc_files


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
    found = nvrtc_files([str(tmp_path / folder) for folder in ("b", "none", "a")])
    assert [str(path.relative_to(tmp_path)) for path in found] == [names[1], names[0], names[3], names[2]]


def test_another_toolchain_is_told_by_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise cuda.CudaError("found no libnvrtc")

    here = cuda.toolchain()
    assert here == cuda.toolchain()
    monkeypatch.setattr(cuda, "_nvrtc_version", lambda: "11.8")
    assert "NVRTC 11.8" in cuda.toolchain() != here
    monkeypatch.setattr(cuda, "_nvrtc_version", missing)
    assert "found no libnvrtc" in cuda.toolchain()


def test_without_a_home_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cuda.CACHE, raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert cuda._cache() == Path("/somewhere/.cache/vllm-fp8ext")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 987654)
    assert cuda._cache().name == "vllm-fp8ext"
