# SPDX-License-Identifier: Apache-2.0
"""Weight quantization straight into its destination: the one path of load, update and digest."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat

_SLICE_ELEMENTS = 1 << 22
"""Elements quantized at once on a CPU: bounds each fp32 temporary to 16 MiB."""
_COPIED_ELEMENTS = 1 << 24
"""Elements copied to the GPU at once."""


def empty_like(weight_NK: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Make uninitialized codes and scales for a weight of this shape.

    They are on its device unless another is named.
    """
    rows, columns = weight_NK.shape
    where = weight_NK.device if device is None else device
    codes = torch.empty(rows, columns, dtype=reference.FP8_DTYPE, device=where)
    scales = torch.empty(reference.blocks(rows), reference.blocks(columns), dtype=torch.float32, device=where)
    return codes, scales


def quantize_weight(
    weight_NK: Tensor, codes_NK: Tensor, scales_NbKb: Tensor, scale_format: ScaleFormat
) -> tuple[float, float]:
    """Quantize `weight_NK` into `codes_NK` and `scales_NbKb` (`reference.quantize_weight`, bit for bit).

    The weight may be of any floating dtype on any device; the work is done where the codes are, a few rows at a time where
    that needs temporaries, so that these stay under 150 MiB whatever the size of the layer. Returns the squared
    quantization error and the squared norm of the weight.

    Raises:
        NonFiniteError: NaN or infinity; some or all of the codes are already written.
    """
    error, norm, wrong = totals([queue(weight_NK, codes_NK, scales_NbKb, scale_format)])[0].tolist()
    if wrong:
        raise reference.NonFiniteError("weight: expected finite values, found NaN or infinity")
    return error, norm


def queue(
    weight_NK: Tensor,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    scale_format: ScaleFormat,
) -> Tensor:
    """The same without waiting for a GPU. Returns sums to add up, `[…, 3]` beside the codes: squared error, squared norm, and
    1 where something is not finite, else 0. A weight in pinned memory must stay as it is until the current stream has come so
    far."""
    if codes_NK.is_cuda:
        return _on_gpu(weight_NK, codes_NK, scales_NbKb, scale_format)
    sums = torch.zeros(3, dtype=torch.float64)
    for rows, row_blocks in _slices(weight_NK, _SLICE_ELEMENTS):
        source = weight_NK[rows].to(codes_NK.device)
        try:
            codes, scales = reference.quantize_weight(source, scale_format)
        except reference.NonFiniteError:
            return torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
        codes_NK[rows] = codes
        scales_NbKb[row_blocks] = scales
        values = source.float()
        sums[0] += (reference.dequantize_weight(codes, scales) - values).square().sum()
        sums[1] += values.square().sum()
    return sums


def totals(sums: Sequence[Tensor]) -> Tensor:
    """Add up what each call of `queue` returned: fp64 `[calls, 3]`, only queued on their device."""
    if sums[0].is_cuda:
        from vllm_fp8ext.kernels.numerics import block_sums

        return block_sums.totals(sums)
    return torch.stack([part.double().reshape(-1, 3).sum(0) for part in sums])


def _on_gpu(
    weight_NK: Tensor,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    scale_format: ScaleFormat,
) -> Tensor:
    sums_NbKb3 = torch.empty(*scales_NbKb.shape, 3, dtype=torch.float32, device=codes_NK.device)
    here = weight_NK.device == codes_NK.device
    from vllm_fp8ext.kernels.quantize import quantize_weight_triton

    ready = here and weight_NK.dtype in quantize_weight_triton.DTYPES
    for rows, row_blocks in _slices(weight_NK, weight_NK.numel() if ready else _COPIED_ELEMENTS):
        source = weight_NK[rows].to(codes_NK.device, non_blocking=True)
        if source.dtype not in quantize_weight_triton.DTYPES:
            source = source.float()
        quantize_weight_triton.launch(  # on the codes' GPU, which is the current one in an engine
            source, codes_NK[rows], scales_NbKb[row_blocks], scale_format, sums_NbKb3[row_blocks]
        )
    return sums_NbKb3


def _slices(weight_NK: Tensor, elements: int) -> Iterator[tuple[slice, slice]]:
    """Rows of about so many elements, and the rows of blocks that they are."""
    rows, columns = weight_NK.shape
    step = max(1, elements // (columns * BLOCK)) * BLOCK
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(start, stop), slice(start // BLOCK, reference.blocks(stop))
