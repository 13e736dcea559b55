# SPDX-License-Identifier: Apache-2.0
"""Selects the GEMM kernels of linear layers: which one multiplies by which weight, for how many tokens.

Replaces: `init_fp8_linear_kernel`, which may take a kernel that repacks weights, and the quantization of activations that
comes with each of its kernels. Can go once this project has kernels of its own for every shape.
"""

import torch
from vllm.platforms import current_platform

from vllm_fp8ext.config import SECTION
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernel_settings import KernelSettings
from vllm_fp8ext.kernels.gemm import registry, selection
from vllm_fp8ext.kernels.gemm.registry import DECODE_GEMM, GEMM_KERNELS
from vllm_fp8ext.kernels.gemm.selection import GemmRoute
from vllm_fp8ext.layers import gemm_kernels
from vllm_fp8ext.log import log_once

FEATURE: str = "core"


def stored_columns(columns: int) -> int:
    """Return the columns that codes of a weight have in memory: on a GPU zeros may lie behind its own."""
    return registry.stored_columns(columns) if current_platform.is_cuda() else columns


def select(shape_NK: tuple[int, int], dtype: torch.dtype, settings: KernelSettings) -> GemmRoute | None:
    """Choose what multiplies by a weight of this shape.

    None where the reference runs: CPUs, shapes that no kernel takes.

    Raises:
        ConfigError: a kernel that the settings name does not take the shape here, or `batch_invariant` can't be kept.
    """
    n, k = shape_NK
    if not current_platform.is_cuda():
        log_once("blockfp8 runs the reference linear layer on this platform")
        return None
    chosen, name = settings.route(n, k), str(dtype).removeprefix("torch.")
    wide = stored_columns(k)
    small_m = (
        not settings.batch_invariant
        and (chosen.decode_tokens != 0 or chosen.gemm in (None, DECODE_GEMM))
        and GEMM_KERNELS[DECODE_GEMM].supports(n, wide, name)
    )
    try:
        route = selection.route(
            (n, wide),
            gemm_kernels.usable(n, wide, name),
            small_m=small_m,
            decode_tokens=chosen.decode_tokens,
            gemm=chosen.gemm,
        )
    except ValueError as error:
        raise ConfigError(f'--additional-config "{SECTION}": kernels.shapes: {error}') from None
    if route is None:
        log_once(f"blockfp8 runs the reference linear layer for shape {n}x{k}: no FP8 kernel takes it (slow)")
        return None
    if settings.batch_invariant and not GEMM_KERNELS[route.gemm].batch_invariant(n, wide):
        raise varies(f"weights of {n}x{k}")
    small = f"decode_gemm up to {route.decode_tokens} tokens, " if route.decode_tokens else ""
    stored = "" if wide == k else f", kept as {n}x{wide},"
    log_once(f"blockfp8 multiplies {n}x{k}{stored} by {small}{route.gemm}{' beyond' if small else ''}")
    fastest = gemm_kernels.LARGE_M[0]
    if route.gemm != fastest.name and chosen.gemm is None:
        log_once(
            f"blockfp8: {fastest.title or fastest.name} does not take {n}x{k} here, {route.gemm} is the next best"
        )
    return route


def varies(what: str) -> ConfigError:
    """Make the error of `batch_invariant` where only a kernel that varies is left.

    `what`: weights or experts. Its sizes change with the number of tokens.
    """
    return ConfigError(
        f"kernels.batch_invariant: {what} are left to vLLM's Triton kernel here, which chooses its sizes by the number of "
        "tokens: expected VLLM_BATCH_INVARIANT=1, for which it does not, or another kernel"
    )
