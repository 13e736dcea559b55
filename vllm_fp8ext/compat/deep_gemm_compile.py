# SPDX-License-Identifier: Apache-2.0
"""Compiles DeepGEMM's kernels ahead, many at a time.

Replaces nothing; DeepGEMM compiles a kernel when it first multiplies at a size, in the process that multiplies and one after
the other: minutes for a model that was never served here. Processes of their own fill its cache on disk, where the worker
finds the kernels. Can go once vLLM's warm-up, or DeepGEMM, compiles in parallel.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import vllm
from vllm.utils.deep_gemm import _lazy_init, fp8_gemm_nt, is_deep_gemm_supported

from vllm_fp8ext.compat.expert_gemm import grouped
from vllm_fp8ext.kernels.quantized import empty
from vllm_fp8ext.kernels.reference import blocks

logger = logging.getLogger("vllm.fp8ext")

MOST_PROCESSES = 16
PROCESS_BYTES = 2 << 30
"""GPU memory for one of them: its context, one weight, the tokens and their product."""
_SECONDS = 900
"""For all of them together."""
_CACHE = "DG_JIT_CACHE_DIR"
"""vLLM's `_lazy_init` sets it."""

Sizes = Mapping[tuple[int, ...], Sequence[int]]
"""Token counts by shape of weight `(N, K)`; numbers of rows by shape of experts `(N, K, E)`."""
Part = tuple[Sequence[int], Sequence[int]]
"""A shape, and some of its counts."""


def compile_ahead(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    """Have the kernels for these sizes on disk. What fails here is compiled by who needs it."""
    if not sizes or not is_deep_gemm_supported():
        return
    _lazy_init()
    try:
        _compile_once(Path(os.environ[_CACHE]), sizes, dtype, device)
    except OSError as error:
        logger.warning("blockfp8: DeepGEMM's kernels are not compiled ahead: %s", error)


def _compile_once(folder: Path, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    """Unless that was done before, with this vLLM on such a GPU; the ranks of one machine wait for the first."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = [vllm.__version__, torch.version.cuda, torch.cuda.get_device_name(device), str(dtype)]
    told = json.dumps([origin, [[shape, sizes[shape]] for shape in sorted(sizes)]])
    done = folder / f"fp8ext-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    with (folder / "fp8ext-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            free, _ = torch.cuda.mem_get_info(device)
            count = max(1, min(MOST_PROCESSES, os.cpu_count() or 1, free // PROCESS_BYTES))
            if _run(shares(sizes, count), dtype, device):
                done.touch()


def shares(sizes: Sizes, count: int) -> list[list[Part]]:
    """The sizes in about `count` parts: token counts that lie side by side mostly need one kernel, and stay together."""
    each = max(1, count // len(sizes))
    parts: list[list[Part]] = []
    for shape, tokens in sizes.items():
        ordered = sorted(tokens)
        step = -(-len(ordered) // each)
        parts += [[(shape, ordered[start : start + step])] for start in range(0, len(ordered), step)]
    return parts


def _run(parts: Sequence[Sequence[Part]], dtype: torch.dtype, device: torch.device) -> bool:
    logger.info(
        "blockfp8: DeepGEMM's kernels are compiled by %d processes, once for this machine", len(parts)
    )
    line = [sys.executable, "-P", "-m", __name__, str(dtype).removeprefix("torch."), str(device.index or 0)]
    until, failed = time.monotonic() + _SECONDS, 0
    with contextlib.ExitStack() as stack:
        started = []
        for part in parts:
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen([*line, json.dumps(part)], stdout=subprocess.DEVNULL, stderr=errors)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append((process, errors))
        for process, errors in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if process.poll() != 0:
                failed += 1
                errors.seek(0)
                told = errors.read().decode(errors="replace")[-300:] or f"not done after {_SECONDS} s"
                logger.warning("blockfp8: compiling ahead failed: %s", told)
    return not failed


@torch.inference_mode()
def main(dtype: str, device: int, sizes: Sequence[Part]) -> None:
    """Multiply once at each size."""
    torch.cuda.set_device(device)
    for shape, counts in sizes:
        n, k, *experts = shape
        weight = torch.zeros(*experts, n, k, dtype=torch.float8_e4m3fn, device="cuda")
        scales = torch.ones(*experts, blocks(n), blocks(k), device="cuda")
        out = torch.empty(max(counts), n, dtype=getattr(torch, dtype), device="cuda")
        ends = torch.zeros(*experts or (1,), dtype=torch.int32, device="cuda")
        for count in counts:  # of any values: a kernel depends on sizes alone
            x = empty(count, k, out.device)
            if experts:
                grouped(x, weight, scales, ends)
            else:
                fp8_gemm_nt(x, (weight, scales), out[:count], is_deep_gemm_e8m0_used=False)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
