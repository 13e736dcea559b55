# SPDX-License-Identifier: Apache-2.0
"""Quantizes what a trainer sends: codes and block scales instead of 16 bits, half the bytes, the same served bytes.

Needs torch, not vLLM.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, NonFiniteError, ScaleFormat
from vllm_fp8ext.kernels.quantize.quantize_weight import empty_like, queue, totals
from vllm_fp8ext.update.contract.dtype_name import dtype_name
from vllm_fp8ext.update.contract.file_versions import Snapshot
from vllm_fp8ext.update.contract.manifest import DTYPES, Manifest, scale_name, scales_beside
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor, file_tensors
from vllm_fp8ext.update.transports.buffers import Buffers

BUFFER_BYTES = 512 << 20
"""Bytes of a buffer of codes and scales on a GPU, side by side: a server there opens few handles."""


_OTHER_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""torch's names of dtypes that no update may have, by those of safetensors."""


def quantized(tensors: Iterable[tuple[str, Any]], *manifests: Manifest) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, quantized on their device as servers with these manifests do it.

    Each that all of them take as codes becomes two: E4M3 codes under its name, then fp32 block scales under `scale_name`. The
    others, and FP8 tensors, pass as they are.

    On a GPU this is only queued, on the current stream: to wait for each weight takes longer than to quantize it, most beside
    an engine on the same GPU.

    Raises:
        ValueError: servers with different scale formats, or a weight that can't be quantized.
        NonFiniteError: NaN or infinity in a weight; of those on a GPU, after the last tensor.
    """
    formats = {manifest.scale_format for manifest in manifests}
    if len(formats) != 1:
        raise ValueError(
            f"expected servers of one scale format, found {', '.join(sorted(formats)) or 'none'}"
        )
    scale_format = cast("ScaleFormat", formats.pop())
    queued: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
    packed, unpacked = Buffers(BUFFER_BYTES), Buffers(0)
    for name, tensor in tensors:
        if not _is_quantized(name, tensor, manifests):
            yield name, tensor
            continue
        _require_quantizable(name, tensor)
        source = tensor.detach().to(manifests[0].dtype_of(name))
        buffers = packed if source.is_cuda else unpacked
        codes, scales = (
            buffers.empty(part.shape, part.dtype, source.device)
            for part in empty_like(source, torch.device("meta"))
        )
        with torch.cuda.device_of(codes):  # kernels run on the current one
            sums = queue(source, codes, scales, scale_format)
        if codes.is_cuda:
            queued[codes.device].append((name, sums))
        else:
            _require_finite([(name, sums)])
        yield name, codes
        yield scale_name(name), scales
    for weights in queued.values():
        _require_finite(weights)


def require_all_quantizable(tensors: Iterable[tuple[str, Any]], *manifests: Manifest) -> None:
    """Raise `ValueError` for a weight that `quantized` would refuse, before anything is sent."""
    for name, tensor in tensors:
        if _is_quantized(name, tensor, manifests):
            _require_quantizable(name, tensor)


def _is_quantized(name: str, tensor: Any, manifests: Sequence[Manifest]) -> bool:
    takes_codes = all(manifest.takes_codes(name) for manifest in manifests)
    return takes_codes and getattr(tensor, "dtype", None) != FP8_DTYPE


def _require_quantizable(name: str, tensor: Any) -> None:
    """Raise `ValueError` unless it is a dense matrix of a dtype that a server takes."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"tensor {name}: expected a torch tensor to quantize, found {type(tensor).__name__}")
    dtype = dtype_name(name, tensor)
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name}: expected dtype {' or '.join(DTYPES)} to quantize, found {dtype}")
    if tensor.ndim != 2:
        raise ValueError(f"tensor {name}: expected a matrix to quantize, found shape {list(tensor.shape)}")


def _require_finite(weights: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `NonFiniteError` for weights of one device, by what `queue` returned on whatever streams."""
    sums = [blocks for _, blocks in weights]
    with torch.cuda.device_of(sums[0]):
        if sums[0].is_cuda:
            torch.cuda.synchronize()
        bad_blocks = totals(sums)[:, 2].tolist()
    wrong = [name for (name, _), bad in zip(weights, bad_blocks, strict=True) if bad]
    if wrong:
        raise NonFiniteError(f"tensors {', '.join(wrong)}: expected finite values, found NaN or infinity")


def stored(checkpoint: Path, device: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a safetensors file, or of a checkpoint's folder.

    Scales come beside their weights. Each is in memory of its own, on this device; by default on the first GPU if there is
    one.

    Raises:
        UpdateError: a checkpoint that can't be read; `file-changed`: a file was changed or replaced before the last tensor
            was read.
        ValueError: a tensor of a dtype that torch has not.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    snapshot = Snapshot.of(checkpoint)
    listed = [(tensor.spec.name, file, tensor) for file in snapshot.files for tensor in file_tensors(file)]
    for name, file, tensor in scales_beside(listed, itemgetter(0)):
        yield name, _read(snapshot, file, tensor).to(device)
    snapshot.require_unchanged()


def _read(snapshot: Snapshot, file: Path, tensor: StoredTensor) -> Tensor:
    spec, data = tensor.spec, torch.empty(tensor.size, dtype=torch.uint8)
    dtype = getattr(torch, _OTHER_DTYPES.get(spec.dtype, spec.dtype), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{file}: tensor {spec.name}: expected a dtype that torch has, found {spec.dtype}")
    rest, position = memoryview(data.numpy()), tensor.start
    with snapshot.opened(file) as content:
        while rest and (count := os.preadv(content.fileno(), [rest], position)):
            rest, position = rest[count:], position + count
    if rest:
        raise ValueError(f"{file}: ends in the middle of {spec.name}")
    return data.view(dtype).view(spec.shape)
