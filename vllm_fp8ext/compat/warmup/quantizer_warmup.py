# SPDX-License-Identifier: Apache-2.0
"""Compiles what quantizes weights, on load and on update, before the server is ready."""

import torch
from torch import Tensor

from vllm_fp8ext.kernels.memory.copy_batched import CopyBatched
from vllm_fp8ext.kernels.memory.copy_blocks import CopyBlocks
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.quantize.quantize_weight import empty_like, quantize_weight
from vllm_fp8ext.kernels.quantize.quantize_weights_batched import Destination, QuantizeBatched

FEATURE: str = "warmup"
WHY: str = "Compile quantizers before the server is ready: the first update would wait for them."
GAIN: str = "no update waits for a compiler"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "never: these kernels are ours"
GPU_ONLY: bool = True

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of tensors that are quantized."""


def warm_up_quantizers(codes_NK: Tensor, scales_NbKb: Tensor, scale_format: ScaleFormat) -> None:
    """Quantize values for weights as wide as this one, laid out alike.

    Kernels differ by whether blocks are whole, and by whether sizes and distances are multiples of 16.
    """
    rows = codes_NK.shape[0]
    rows_of_a_block = codes_NK[: min(rows, BLOCK) + rows % BLOCK]
    codes, scales = (
        torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)
        for part in (rows_of_a_block, scales_NbKb[: blocks(rows_of_a_block.shape[0])])
    )
    for source in SOURCES:
        values = torch.zeros(rows_of_a_block.shape, dtype=source, device=rows_of_a_block.device)
        quantize_weight(values, codes, scales, scale_format)


def warm_up_together(device: torch.device, scale_format: ScaleFormat) -> None:
    """Bring values, and codes, to their places together with others, in whole blocks or not: kernels that know no shapes."""
    for columns in (BLOCK, BLOCK // 2):
        for source in SOURCES:
            part = torch.zeros(BLOCK, columns, dtype=source, device=device)
            where = torch.tensor([part.data_ptr()])
            QuantizeBatched([Destination(*empty_like(part), columns)], source, scale_format).queue(where)
            CopyBatched([torch.empty_like(part)]).queue(where)
        codes, scales = empty_like(part)
        both = torch.tensor([[codes.data_ptr(), scales.data_ptr()]])
        CopyBlocks([Destination(*empty_like(part), columns)], [scales.stride(0)], scale_format).queue(both)
