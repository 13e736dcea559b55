# SPDX-License-Identifier: Apache-2.0
"""Which NVRTC is taken."""

from pathlib import Path

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
