# SPDX-License-Identifier: Apache-2.0
"""Compiles DeepGEMM's kernels ahead, many at a time.

DeepGEMM compiles a kernel when it first multiplies at a size, in the process that multiplies and one after the other: minutes
for a model that was never served here. Processes of their own fill its cache on disk, where the worker finds the kernels.

Which sizes share a kernel DeepGEMM alone knows. So processes take one size after the other from one list (`deep_gemm_sizes`),
in which those that follow each other lie far apart: at first each finds a kernel that nobody has, and at last almost all are
on disk.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import vllm
from vllm.utils.deep_gemm import _lazy_init, is_deep_gemm_supported

from vllm_fp8ext.compat.warmup.deep_gemm_sizes import Size, Sizes, ordered, take, write
from vllm_fp8ext.environment import cores
from vllm_fp8ext.kernels.numerics.quantized import empty
from vllm_fp8ext.kernels.numerics.reference import blocks
from vllm_fp8ext.layers.deep_gemm import compiler, multiply
from vllm_fp8ext.layers.expert_gemm import grouped

FEATURE: str = "warmup"
WHY: str = (
    "Compile DeepGEMM's kernels on all cores: DeepGEMM compiles one after the other, in the "
    "process that multiplies."
)
GAIN: str = "a start on a new machine takes seconds instead of minutes"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's warm-up, or DeepGEMM, compiles in parallel"
GPU_ONLY: bool = True

logger = logging.getLogger("vllm.fp8ext")

MOST_PROCESSES = 32
CONTEXT_BYTES = 1 << 30
"""GPU memory of a process before it multiplies."""
_SECONDS = 900
"""For all of them together."""
_CACHE = "DG_JIT_CACHE_DIR"
"""vLLM's `_lazy_init` sets it."""


def compile_ahead(sizes: Sizes, device: torch.device) -> None:
    """Have the kernels for these sizes on disk. What fails here is compiled by who needs it."""
    if not sizes or not is_deep_gemm_supported():
        return
    _lazy_init()
    try:
        _compile_once(Path(os.environ[_CACHE]), sizes, device)
    except OSError as error:
        logger.warning("blockfp8: DeepGEMM's kernels are not compiled ahead: %s", error)


def _compile_once(folder: Path, sizes: Sizes, device: torch.device) -> None:
    """Unless that was done before, with this vLLM and compiler on such a GPU; the ranks of one machine wait for the first."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = [vllm.__version__, torch.version.cuda, torch.cuda.get_device_name(device), compiler()]
    key = json.dumps([origin, [[shape, sizes[shape]] for shape in sorted(sizes)]])
    done = folder / f"fp8ext-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    with (folder / "fp8ext-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            free, _ = torch.cuda.mem_get_info(device)
            listed = ordered(sizes)
            count = min(MOST_PROCESSES, cores(), free // process_bytes(listed), len(listed))
            if _run(listed, max(1, count), device):
                done.touch()


def process_bytes(sizes: Sequence[Size]) -> int:
    """GPU memory that a process can need: weight, tokens and product, and as much again that torch keeps."""
    needed = (n * k * (experts[0] if experts else 1) + m * (k + 2 * n) for m, n, k, *experts in sizes)
    return CONTEXT_BYTES + 2 * max(needed)


def _run(sizes: Sequence[Size], count: int, device: torch.device) -> bool:
    logger.info("blockfp8: DeepGEMM's kernels are compiled by %d processes, once for this machine", count)
    line = [sys.executable, "-P", "-m", __name__, str(device.index or 0)]
    until, failed = time.monotonic() + _SECONDS, 0
    with contextlib.ExitStack() as stack:
        listed = stack.enter_context(tempfile.TemporaryFile(buffering=0))
        write(listed, sizes)
        started = []
        for _ in range(count):
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(line, stdin=listed, stdout=subprocess.DEVNULL, stderr=errors)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append((process, errors))
        for process, errors in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if process.poll() != 0:
                failed += 1
                errors.seek(0)
                message = errors.read().decode(errors="replace")[-300:] or f"not done after {_SECONDS} s"
                logger.warning("blockfp8: compiling ahead failed: %s", message)
    return not failed


@torch.inference_mode()
def main(device: int) -> None:
    """Multiply once at each size that is left in the list on standard input. A kernel depends on sizes alone: values are any,
    and no row belongs to an expert."""
    torch.cuda.set_device(device)
    for m, n, k, *experts in take(sys.stdin.fileno()):
        if not experts:
            multiply(m, n, k)
            continue
        weight = torch.empty(*experts, n, k, dtype=torch.float8_e4m3fn, device="cuda")
        scales = torch.empty(*experts, blocks(n), blocks(k), device="cuda")
        x = empty(m, k, weight.device)
        grouped(x, weight, scales, torch.zeros(*experts, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(int(sys.argv[1]))
