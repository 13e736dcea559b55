# SPDX-License-Identifier: Apache-2.0
"""Compiles CUDA C++ by NVRTC, which comes with torch: without a compiler on the machine.

Nothing is loaded at import. Machine code is for `sm_90a`, and is kept on disk.
"""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_fp8ext.environment import CACHE
from vllm_fp8ext.kernels.runtime import compile_counts
from vllm_fp8ext.kernels.runtime.cuda_kernel import CudaError

ARCHITECTURE = "sm_90a"
_DEVICE = Path(__file__).with_name("device.cuh")


def compile_source(source: str, headers: Mapping[str, str], defines: Mapping[str, int]) -> bytes:
    """Machine code for `sm_90a` of a CUDA C++ source; `headers` are what it includes, by name, beside `device.cuh`.

    Kept on disk, under `FP8EXT_CACHE` (default `~/.cache/vllm-fp8ext`), by everything that it is made from.
    """
    headers = {_DEVICE.name: _DEVICE.read_text(), **headers}
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    made_from = [
        source,
        *itertools.chain(*sorted(headers.items())),
        ARCHITECTURE,
        str(sorted(defines.items())),
    ]
    name = hashlib.sha256("\0".join([*made_from, f"{major.value}.{minor.value}"]).encode()).hexdigest()
    file = _kept(name)
    if file is None:
        return _compiled(nvrtc, source, headers, defines)
    with contextlib.suppress(OSError):
        return file.read_bytes()
    code = _compiled(nvrtc, source, headers, defines)
    with contextlib.suppress(OSError):  # a disk that takes nothing only makes the next start slower
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            part.write(code)
        os.replace(part.name, file)
    return code


def _kept(name: str) -> Path | None:
    """Return the file of machine code of this name; a user without a home keeps none."""
    try:
        return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "vllm-fp8ext") / f"{name}.cubin"
    except RuntimeError:
        return None


def _compiled(
    nvrtc: ctypes.CDLL, source: str, headers: Mapping[str, str], defines: Mapping[str, int]
) -> bytes:
    compile_counts.note("nvrtc")
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", len(headers), texts, names
    ):
        raise CudaError("NVRTC made no program")
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        if failed:
            raise CudaError(f"NVRTC: {_nvrtc_bytes(program, 'ProgramLog').decode(errors='replace')}")
        return _nvrtc_bytes(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def nvrtc_files(entries: Iterable[str]) -> list[Path]:
    """NVRTC among the packages in these folders: the newest version first, and of one version that of the first folder."""
    libraries = [
        path
        for entry in entries
        for path in (Path(entry) / "nvidia").glob("cu*/lib/libnvrtc.so.*")  # cu13, cuda_nvrtc
    ]
    return sorted(
        libraries, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)], reverse=True
    )


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The newest NVRTC among the packages that torch installs, else the system's."""
    for path in nvrtc_files(sys.path):
        try:
            # NVRTC looks for this part of itself by bare name: have it loaded already
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise CudaError(f"NVRTC can't be loaded: {error}") from None
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise CudaError("found no libnvrtc: pip install nvidia-cuda-nvrtc of torch's CUDA version")


def _nvrtc_bytes(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(_nvrtc(), f"nvrtcGet{what}")(program, buffer)
    return buffer.raw
