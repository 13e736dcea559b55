# SPDX-License-Identifier: Apache-2.0
"""FP8 GEMM for small M (`decode_gemm.cu`).

Activations come in BF16 and are quantized inside, or come quantized. Weights are read once, from before the launch ahead has
ended.

Written in CUDA C++: on Hopper only `wgmma` multiplies FP8 (`mma.sync` is converted to FP16), and Triton can neither fetch
weights while a block quantizes its activations, nor keep those in shared memory, nor add up a split over K inside the
launch.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.kernels.gemm import decode_gemm_configs
from vllm_fp8ext.kernels.gemm.decode_gemm_configs import TileConfig
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.runtime import cuda_kernel, nvrtc

_SOURCE = Path(__file__).with_suffix(".cu")
_KINDS = {torch.bfloat16: "BF16", reference.FP8_DTYPE: "E4M3"}
PROLOGUE_TOKENS = 16
"""Most tokens that are quantized inside faster than by a launch of their own before."""


def decode_gemm(
    x: Tensor | Quantized,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None,
    scale_format: ScaleFormat,
    config: TileConfig | None = None,
) -> Tensor:
    """`x @ weight.T (+ bias)`, BF16 `[M, N]`.

    `x`: BF16 `[M, K]`, quantized inside as `reference.quantize_activation` does, or quantized already (in `scale_format`,
    which then makes no difference). `config`: another one than `choose`'s.

    Raises:
        ValueError: a shape, layout or dtype that the kernel does not take.
    """
    values, scales = x if isinstance(x, Quantized) else (x, None)
    m, (n, k) = values.shape[0], codes_NK.shape
    _check(values, scales, codes_NK, scales_NbKb, bias_N, config)
    tokens = decode_gemm_configs.width(m)
    if scales is not None:
        scale_format = "fp32"  # makes no difference then
    if config is None:
        config = _chosen(n, k, tokens, scale_format, scales is not None, values.device.index)
    kernel = _kernel(
        *(config.rows, config.splits, tokens, scale_format, scales is not None, config.stream),
        values.device.index,
    )
    shared = config.shared_bytes(tokens, k)
    grid = min(-(-n // config.rows), kernel.resident_blocks(shared) // config.splits) * config.splits
    out_MN = torch.empty(m, n, dtype=torch.bfloat16, device=values.device)
    arguments = (
        _map(codes_NK.data_ptr(), (n, k), codes_NK.stride(0), config.rows),
        *_activations(values, scales, tokens),
        ctypes.c_void_p(scales_NbKb.data_ptr()),
        ctypes.c_void_p(None if bias_N is None else bias_N.data_ptr()),
        ctypes.c_void_p(out_MN.data_ptr()),
        *(ctypes.c_uint(size) for size in (m, n, k, config.ring(tokens, k))),
    )
    stream = torch.cuda.current_stream(values.device).cuda_stream
    kernel.launch(grid, shared, stream, arguments, early=config.early)
    return out_MN


@functools.cache
def _chosen(
    n: int, k: int, tokens: int, scale_format: ScaleFormat, quantized: bool, device: int | None
) -> TileConfig:
    """Return the fastest tile config that this GPU runs.

    One with fewer multiprocessors to a cluster has no room for 16 blocks together.
    """
    config = decode_gemm_configs.choose(n, k, tokens, quantized=quantized)
    while config.splits > 1:
        kernel = _kernel(config.rows, config.splits, tokens, scale_format, quantized, config.stream, device)
        try:
            resident = kernel.resident_blocks(config.shared_bytes(tokens, k))
        except cuda_kernel.CudaError:
            resident = 0
        if resident >= config.splits:
            break
        config = decode_gemm_configs.choose(n, k, tokens, quantized=quantized, most_splits=config.splits // 2)
    return config


@functools.cache
def machine_code(
    rows: int, splits: int, tokens: int, scale_format: ScaleFormat, quantized: bool, stream: bool
) -> bytes:
    """Compile one kernel; needs no GPU."""
    macros = {"ROWS": rows, "TOKENS": tokens, "SPLITS": splits, "POW2": int(scale_format == "pow2")}
    macros |= {"CODES": int(quantized), "STREAM": int(stream)}
    return nvrtc.compile_source(_SOURCE.read_text(), {"wgmma.cuh": _wgmma(tokens)}, macros)


@functools.cache
def _kernel(
    rows: int,
    splits: int,
    tokens: int,
    scale_format: ScaleFormat,
    quantized: bool,
    stream: bool,
    _device: int | None,
) -> cuda_kernel.Kernel:
    code = machine_code(rows, splits, tokens, scale_format, quantized, stream)
    return cuda_kernel.Kernel(code, "decode_gemm", rows * 2 + 32, splits)


def _activations(values: Tensor, scales: Tensor | None, tokens: int) -> tuple[Any, ...]:
    """The kernel's arguments about x."""
    if scales is None:
        return ctypes.c_void_p(values.data_ptr()), ctypes.c_longlong(values.stride(0))
    m, k = values.shape
    return (
        _map(values.data_ptr(), (m, k), values.stride(0), tokens),
        ctypes.c_void_p(scales.data_ptr()),
        ctypes.c_longlong(scales.stride(1)),
    )


@functools.lru_cache(maxsize=4096)
def _map(address: int, shape: tuple[int, int], pitch: int, rows: int) -> cuda_kernel.TensorMap:
    """For copies of `rows` rows and 128 columns of codes."""
    return cuda_kernel.byte_matrix_map(address, shape, pitch, (rows, BLOCK))


def _wgmma(tokens: int) -> str:
    """`wgmma` for a width: 64 rows of weights times `tokens` rows of activations, 32 columns."""
    count = tokens // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
DEVICE void wgmma(float (&d)[{count}], u64 a, u64 b, u32 accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{tokens}k32.f32.e4m3.e4m3 "
      "{{{registers}}}, %{count}, %{count + 1}, p, 1, 1;\\n}}"
      : {outputs}
      : "l"(a), "l"(b), "r"(accumulate));
}}
"""


def _check(
    x_MK: Tensor,
    x_scales_MKb: Tensor | None,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None,
    config: TileConfig | None,
) -> None:
    """Raise `ValueError` naming everything that the kernel does not take."""
    faults = {
        **_activation_faults(x_MK, x_scales_MKb, codes_NK.shape[1]),
        **_weight_faults(codes_NK, scales_NbKb, bias_N),
        **_config_faults(config, *x_MK.shape, quantized=x_scales_MKb is not None),
    }
    problems = [text for text, wrong in faults.items() if wrong]
    if problems:
        raise ValueError(f"decode_gemm: expected {'; '.join(problems)}")


def _activation_faults(x_MK: Tensor, x_scales_MKb: Tensor | None, columns: int) -> dict[str, bool]:
    """Return each requirement of activations, and whether it is broken."""
    (m, k), most = x_MK.shape, decode_gemm_configs.TOKENS[-1]
    dtype = torch.bfloat16 if x_scales_MKb is None else reference.FP8_DTYPE
    return {
        f"{most} tokens at most, found {m}": not 0 < m <= most,
        f"weights of {k} columns, found {columns}": columns != k,
        f"columns in multiples of 16, found {k}": k % 16 != 0,
        f"{_KINDS[dtype]} activations, found {x_MK.dtype}": x_MK.dtype != dtype,
        f"fp32 scales of activations [{m}, {blocks(k)}] with adjacent tokens, aligned columns": (
            x_scales_MKb is not None
            and (
                tuple(x_scales_MKb.shape) != (m, blocks(k))
                or x_scales_MKb.dtype != torch.float32
                or not _columns_aligned(x_scales_MKb)
            )
        ),
        "rows of activations that begin at multiples of 16 bytes": not aligned(x_MK),
    }


def _weight_faults(codes_NK: Tensor, scales_NbKb: Tensor, bias_N: Tensor | None) -> dict[str, bool]:
    """Return each requirement of a weight and its bias, and whether it is broken."""
    n, k = codes_NK.shape
    return {
        f"E4M3 codes, found {codes_NK.dtype}": codes_NK.dtype != torch.float8_e4m3fn,
        f"contiguous fp32 scales [{blocks(n)}, {blocks(k)}], found {list(scales_NbKb.shape)}": (
            tuple(scales_NbKb.shape) != (blocks(n), blocks(k))
            or scales_NbKb.dtype != torch.float32
            or not scales_NbKb.is_contiguous()
        ),
        "rows of weights that begin at multiples of 16 bytes": not aligned(codes_NK),
        f"a contiguous BF16 bias [{n}]": (
            bias_N is not None
            and (bias_N.dtype != torch.bfloat16 or tuple(bias_N.shape) != (n,) or not bias_N.is_contiguous())
        ),
    }


def _config_faults(config: TileConfig | None, m: int, k: int, *, quantized: bool) -> dict[str, bool]:
    """Return each requirement of a tile config, and whether it is broken."""
    if config is None:
        return {}
    known = 0 < m <= decode_gemm_configs.TOKENS[-1]
    return {
        f"a tile config that fits, found {config}": (
            known and not config.fits(decode_gemm_configs.width(m), k)
        ),
        "quantized activations for the ring": config.stream and not quantized,
    }


def _columns_aligned(scales_MKb: Tensor) -> bool:
    """Tell whether columns are contiguous and begin at multiples of 16 bytes."""
    m, columns = scales_MKb.shape
    adjacent = m == 1 or scales_MKb.stride(0) == 1
    apart = columns == 1 or (scales_MKb.stride(1) % 4 == 0 and scales_MKb.stride(1) >= m)
    return adjacent and apart and scales_MKb.data_ptr() % 16 == 0


def aligned(matrix: Tensor) -> bool:
    """Tell whether rows are contiguous and begin at multiples of 16 bytes."""
    size = matrix.element_size()
    return matrix.stride(1) == 1 and matrix.stride(0) * size % 16 == 0 and matrix.data_ptr() % 16 == 0
