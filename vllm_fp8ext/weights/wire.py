# SPDX-License-Identifier: Apache-2.0
"""FP8 on the wire: codes and block scales instead of 16 bits, half the bytes, the same served bytes. For trainers: needs
torch, not vLLM."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from vllm_fp8ext.kernels.quantize_weight import empty_like, quantize_weight
from vllm_fp8ext.kernels.reference import FP8_DTYPE, ScaleFormat
from vllm_fp8ext.weights.manifest import Manifest, scale_name


def quantized(tensors: Iterable[tuple[str, Any]], *manifests: Manifest) -> Iterator[tuple[str, Any]]:
    """The same tensors, quantized on their device as the servers of these manifests would quantize them: each that all of
    them take as codes becomes two, E4M3 codes under its name, then fp32 block scales under `scale_name`. The others, and FP8
    tensors, pass as they are.

    Raises:
        ValueError: servers with different scale formats, or a weight that is no torch tensor.
        NonFiniteError: NaN or infinity in a weight.
    """
    formats = {manifest.scale_format for manifest in manifests}
    if len(formats) != 1:
        raise ValueError(
            f"expected servers of one scale format, found {', '.join(sorted(formats)) or 'none'}"
        )
    form = cast("ScaleFormat", formats.pop())
    for name, tensor in tensors:
        taken = all(manifest.takes_codes(name) for manifest in manifests)
        if not taken or getattr(tensor, "dtype", None) == FP8_DTYPE:
            yield name, tensor
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"tensor {name}: expected a torch tensor to quantize, found {type(tensor).__name__}"
            )
        source = tensor.detach().to(manifests[0].dtype_of(name))
        codes, scales = empty_like(source)
        with torch.cuda.device_of(codes):  # kernels run on the current one
            quantize_weight(source, codes, scales, form)
        yield name, codes
        yield scale_name(name), scales


def stored(checkpoint: Path, device: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file, or of all of them in a folder, one at a time; on the first GPU if there is one, or
    on this device."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for file in sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]:
        with safe_open(file, framework="pt", device=device) as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                yield name, opened.get_tensor(name)
