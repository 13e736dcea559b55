# SPDX-License-Identifier: Apache-2.0
"""FP8 GEMM for few tokens (`decode_gemm.cu`): activations in BF16, quantized inside, or quantized before; weights read once
at memory speed.

Written in CUDA C++: on Hopper only `wgmma` multiplies FP8 (`mma.sync` is converted to FP16), and Triton can neither fetch
weights while a block quantizes its activations, nor keep those in shared memory, nor add up a split over K inside the
launch.
"""

import ctypes
import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.kernels import cuda, reference
from vllm_fp8ext.kernels.quantized import Quantized
from vllm_fp8ext.kernels.reference import BLOCK, ScaleFormat, blocks

TOKENS = (8, 16, 32, 64, 128)
"""Widths that kernels are built for; a batch takes the smallest that holds it."""
SPLITS = (1, 2, 4, 8, 16)
_CLUSTERS = {1: 132, 2: 66, 4: 32, 8: 16, 16: 8}
"""Clusters of so many blocks that run at once on 132 multiprocessors in groups of 16 and 18."""
_SOURCE = Path(__file__).with_suffix(".cu")
_WIDEST = {192: 64, 256: 64}
"""Widest TOKENS for a tile of so many rows, where accumulators of more don't fit in its threads' registers."""
_KINDS = {torch.bfloat16: "BF16", reference.FP8_DTYPE: "E4M3"}
_FEWEST_STAGES = 3
_HALF = 113 * 1024
"""Shared memory with which two blocks fit on a multiprocessor."""
_MEASURED = _SOURCE.with_name("decode_cuts.json")
PROLOGUE_TOKENS = 16
"""Most tokens that are quantized inside faster than by a launch of their own before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How one GEMM is cut: see the top of `decode_gemm.cu`."""

    rows: int
    """Weight rows of a tile: 64, 128, 192 or 256."""
    splits: int
    """Parts of K, each taken by one block of a cluster: 1, 2, 4, 8 or 16."""
    stages: int = 0
    """Depth of the shared-memory ring, in blocks of 128 columns; 0: as deep as fits and is of use."""
    stream: bool = False
    """Activations that come quantized go through the ring, again for each tile, and leave shared memory for a second block on
    the multiprocessor: for weights of few tiles."""
    early: bool = False
    """Start while the previous kernel of the stream still runs (programmatic dependent launch). Only where that kernel
    does not write this one's weights."""

    def ring(self, tokens: int, k: int) -> int:
        """Stages that a kernel of so many TOKENS gets."""
        room = cuda.MOST_SHARED_BYTES - self._fixed_bytes(tokens, k)
        fitting = room // self._stage_bytes(tokens)
        return max(0, min(self.stages or fitting, fitting))

    def shared_bytes(self, tokens: int, k: int) -> int:
        """Shared memory of a block."""
        return self.ring(tokens, k) * self._stage_bytes(tokens) + self._fixed_bytes(tokens, k)

    def fits(self, tokens: int, k: int) -> bool:
        """Whether the part of x that a block keeps leaves room for a ring, and the accumulators fit in registers."""
        return self.ring(tokens, k) >= _FEWEST_STAGES and tokens <= _WIDEST.get(self.rows, TOKENS[-1])

    def _stage_bytes(self, tokens: int) -> int:
        return self.rows * BLOCK + 16 + (_x_bytes(tokens) if self.stream else 0)

    def _fixed_bytes(self, tokens: int, k: int) -> int:
        depth, warps = 0 if self.stream else -(-blocks(k) // self.splits), self.rows // 16
        owned = -(-warps * (tokens // 8) // self.splits)
        received = self.splits * owned * 512 if self.splits > 1 else 0
        return depth * _x_bytes(tokens) + received + warps * 16


def _x_bytes(tokens: int) -> int:
    """Shared memory of 128 columns of x: codes, scales, barrier."""
    return tokens * (BLOCK + 4) + 8


def usable(m: int, n: int, k: int) -> bool:
    """Whether this kernel takes the shape."""
    if not (0 < m <= TOKENS[-1] and n > 0 and k > 0 and k % 16 == 0):
        return False
    return any(Config(rows=64, splits=splits).fits(width(m), k) for splits in SPLITS)


def width(m: int) -> int:
    """TOKENS of the kernel that takes `m` tokens."""
    return next(tokens for tokens in TOKENS if tokens >= m)


def widths(most: int) -> tuple[int, ...]:
    """TOKENS of every kernel that batches of up to `most` tokens take."""
    return tuple(tokens for tokens in TOKENS if tokens <= width(most)) if most else ()


def cuts(n: int, k: int, tokens: int, *, quantized: bool) -> list[Config]:
    """Every cut that fits: with as deep a ring as fits, and with one that leaves room for a second block on the
    multiprocessor, of the next kernel for example."""
    found = []
    for rows, splits in itertools.product((64, 128, 192, 256), SPLITS):
        for stream in (False, True)[: 1 + quantized]:
            cut = Config(rows=rows, splits=splits, stream=stream, early=True)
            if splits > blocks(k) or not cut.fits(tokens, k):
                continue
            deep = cut.ring(tokens, k)
            fitting = (
                dataclasses.replace(cut, stages=stages) for stages in range(deep, _FEWEST_STAGES - 1, -1)
            )
            shallow = (other for other in fitting if other.shared_bytes(tokens, k) <= _HALF)
            found += list(
                dict.fromkeys([dataclasses.replace(cut, stages=deep), *itertools.islice(shallow, 1)])
            )
    return found


def cost(config: Config, n: int, k: int, tokens: int, *, quantized: bool) -> float:
    """What ranks cuts of shapes that were not measured: about their time in us.

    Fitted to the sweep of 12 shapes (`benchmarks/kernel_sweep.py`): for a shape that it has not seen, the cut of the lowest
    cost takes 1.1 times as long as the best on average.
    """
    tiles, depth = -(-n // config.rows), -(-blocks(k) // config.splits)
    side_by_side = _CLUSTERS[config.splits]
    shared = config.shared_bytes(tokens, k) <= _HALF
    waves = -(-tiles // (side_by_side * (1 + shared)))
    turns = -(-tiles // side_by_side)
    weights, x = config.rows * depth * BLOCK, tokens * depth * BLOCK
    again = waves if config.stream else 1
    features = (
        turns * weights / 32e3,  # what comes to one multiprocessor, at 32 bytes a nanosecond
        tiles * weights * config.splits / 132 / 32e3,  # the same if all had the same share
        x * again * (1 + (shared and tiles > side_by_side)) / 32e3,
        turns * config.rows * tokens * 4 / 32e3 if config.splits > 1 else 0.0,  # sums that ranks exchange
        math.log2(config.splits),
        turns * depth * config.rows / 64 * tokens / 1e3,
        turns * depth * tokens / 1e3,
        waves * depth / 10,
        waves,
    )
    weighted = _QUANTIZED_COSTS if quantized else _COSTS
    return sum(weight * feature for weight, feature in zip(weighted, features, strict=True))


_COSTS = (0.154, 0.071, 2.655, 1.278, 0.275, 0.77, 0.057, 0.186, 0.231)
_QUANTIZED_COSTS = (0.055, 0.181, 0.064, 1.515, 0.296, 0.0, 0.695, 0.589, 0.605)


@functools.cache
def choose(n: int, k: int, tokens: int, *, quantized: bool) -> Config:
    """The cut that was measured as the fastest for this shape, else the one of the lowest cost. `quantized`: as x comes."""
    known = _measured().get((n, k, tokens, quantized))
    if known is not None and known.fits(tokens, k):
        return known
    return min(
        cuts(n, k, tokens, quantized=quantized), key=lambda cut: cost(cut, n, k, tokens, quantized=quantized)
    )


@functools.cache
def _measured() -> dict[tuple[int, int, int, bool], Config]:
    """By weight rows and columns, TOKENS, and whether x comes quantized; as `benchmarks/kernel_sweep.py` writes them."""
    return {
        (case["n"], case["k"], case["tokens"], case["quantized"]): Config(
            rows=case["rows"],
            splits=case["splits"],
            stages=case["stages"],
            stream=case["stream"],
            early=True,
        )
        for case in json.loads(_MEASURED.read_text())["cuts"]
    }


def decode_gemm(
    x: Tensor | Quantized,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None,
    scale_format: ScaleFormat,
    config: Config | None = None,
) -> Tensor:
    """`x @ weight.T (+ bias)`, BF16 `[M, N]`.

    `x`: BF16 `[M, K]`, quantized inside as `reference.quantize_activation` does, or quantized already (in `scale_format`,
    which then makes no difference). `config`: another cut than `choose`'s.

    Raises:
        ValueError: a shape, layout or dtype that the kernel does not take.
    """
    values, scales = x if isinstance(x, Quantized) else (x, None)
    m, (n, k) = values.shape[0], codes_NK.shape
    if config is None:
        usual = Config(rows=64, splits=1)
        config = choose(n, k, width(m), quantized=scales is not None) if 0 < m <= TOKENS[-1] else usual
    _check(values, scales, codes_NK, scales_NbKb, bias_N, config)
    tokens = width(m)
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
def machine_code(
    rows: int, splits: int, tokens: int, scale_format: ScaleFormat, quantized: bool, stream: bool
) -> bytes:
    """Compile one kernel; needs no GPU."""
    macros = {"ROWS": rows, "TOKENS": tokens, "SPLITS": splits, "POW2": int(scale_format == "pow2")}
    macros |= {"CODES": int(quantized), "STREAM": int(stream)}
    return cuda.compile_source(_SOURCE.read_text(), {"wgmma.cuh": _wgmma(tokens)}, macros)


@functools.cache
def _kernel(
    rows: int,
    splits: int,
    tokens: int,
    scale_format: ScaleFormat,
    quantized: bool,
    stream: bool,
    _device: int,
) -> cuda.Kernel:
    form: ScaleFormat = "fp32" if quantized else scale_format
    code = machine_code(rows, splits, tokens, form, quantized, stream)
    return cuda.Kernel(code, "decode_gemm", rows * 2 + 32, splits)


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
def _map(address: int, shape: tuple[int, int], pitch: int, rows: int) -> cuda.TensorMap:
    """For copies of `rows` rows and 128 columns of codes."""
    return cuda.byte_matrix_map(address, shape, pitch, (rows, BLOCK))


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
    config: Config,
) -> None:
    (m, k), n = x_MK.shape, codes_NK.shape[0]
    dtype = torch.bfloat16 if x_scales_MKb is None else reference.FP8_DTYPE
    problems = [
        text
        for text, wrong in (
            (f"{TOKENS[-1]} tokens at most, found {m}", not 0 < m <= TOKENS[-1]),
            (f"weights of {k} columns, found {codes_NK.shape[1]}", codes_NK.shape[1] != k),
            (f"columns in multiples of 16, found {k}", k % 16 != 0),
            (f"{_KINDS[dtype]} activations, found {x_MK.dtype}", x_MK.dtype != dtype),
            (
                f"fp32 scales of activations [{m}, {blocks(k)}] with adjacent tokens, aligned columns",
                x_scales_MKb is not None
                and (
                    tuple(x_scales_MKb.shape) != (m, blocks(k))
                    or x_scales_MKb.dtype != torch.float32
                    or not _columns_aligned(x_scales_MKb)
                ),
            ),
            (f"E4M3 codes, found {codes_NK.dtype}", codes_NK.dtype != torch.float8_e4m3fn),
            (
                f"contiguous fp32 scales [{blocks(n)}, {blocks(k)}], found {list(scales_NbKb.shape)}",
                tuple(scales_NbKb.shape) != (blocks(n), blocks(k))
                or scales_NbKb.dtype != torch.float32
                or not scales_NbKb.is_contiguous(),
            ),
            (
                f"a cut that fits, found {config}",
                0 < m <= TOKENS[-1] and not config.fits(width(m), k),
            ),
            ("quantized activations for the ring", config.stream and x_scales_MKb is None),
            ("rows of activations that begin at multiples of 16 bytes", not aligned(x_MK)),
            ("rows of weights that begin at multiples of 16 bytes", not aligned(codes_NK)),
            (
                f"a contiguous BF16 bias [{n}]",
                bias_N is not None
                and (
                    bias_N.dtype != torch.bfloat16
                    or tuple(bias_N.shape) != (n,)
                    or not bias_N.is_contiguous()
                ),
            ),
        )
        if wrong
    ]
    if problems:
        raise ValueError(f"decode_gemm: expected {'; '.join(problems)}")


def _columns_aligned(scales_MKb: Tensor) -> bool:
    """Whether columns are contiguous and begin at multiples of 16 bytes."""
    m, columns = scales_MKb.shape
    adjacent = m == 1 or scales_MKb.stride(0) == 1
    apart = columns == 1 or (scales_MKb.stride(1) % 4 == 0 and scales_MKb.stride(1) >= m)
    return adjacent and apart and scales_MKb.data_ptr() % 16 == 0


def aligned(matrix: Tensor) -> bool:
    """Whether rows are contiguous and begin at multiples of 16 bytes."""
    size = matrix.element_size()
    return matrix.stride(1) == 1 and matrix.stride(0) * size % 16 == 0 and matrix.data_ptr() % 16 == 0
