# SPDX-License-Identifier: Apache-2.0
"""Reads and validates the header of a safetensors file or body, without touching a tensor. Needs neither torch nor vLLM.

The format (https://github.com/huggingface/safetensors#format): eight bytes of little-endian header length, a JSON object of
`{name: {"dtype", "shape", "data_offsets"}}`, then the tensors, which cover the rest without holes or overlaps.
"""

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.regular_file import opened, path_error
from vllm_fp8ext.update.contract.update_errors import listed

HEADER_LIMIT = 16 << 20
"""Longest header that is read, in bytes: room for 100,000 tensors."""

_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,512}")
_SHOWN = 100
"""Characters that are told of a name that is none."""
_DTYPE = 32
"""Longest name of a dtype, in characters."""
_DIMENSIONS = 64
"""Most that a tensor may have: torch works on no more."""

_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
_TORCH_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "BOOL": "bool",
}

Read = Callable[[int, int], bytes]
"""`read(start, size)`: bytes of a file or body; fewer at its end."""


class StoredTensor(NamedTuple):
    """One tensor and where its bytes lie. `start` counts from the first byte of the file or body."""

    spec: TensorSpec
    start: int
    size: int


def file_tensors(file: Path) -> list[StoredTensor]:
    """Every tensor of a safetensors file.

    Raises:
        UpdateError: as `parse`; `not-found` or `unreadable` when it can't be opened.
    """
    try:
        with opened(file) as content:
            return stored_tensors(content, file.name)
    except OSError as error:
        raise path_error(file, error) from None


def stored_tensors(content: BinaryIO, name: str) -> list[StoredTensor]:
    """Every tensor of an open safetensors file, which `name` stands for in messages.

    Raises:
        UpdateError: as `parse`.
    """

    def read(start: int, size: int) -> bytes:
        content.seek(start)
        return content.read(size)

    return parse(read, os.fstat(content.fileno()).st_size, name)


def parse(read: Read, length: int, name: str) -> list[StoredTensor]:
    """Return every tensor of a file or body. `length`: its bytes; `name`: stands for it in messages. They tell nothing of
    what is no header: somebody may have named a file that is none of theirs.

    Raises:
        UpdateError: as `read_header` and `described_tensors`.
    """
    return described_tensors(read_header(read, length, name), length, name)


def read_header(read: Read, length: int, name: str, limit: int | None = None) -> bytes:
    """Return the header of a file or body of `length` bytes, called `name` in messages.

    Raises:
        UpdateError: `header-too-large`: more than `limit` bytes, by default `HEADER_LIMIT`; `broken-safetensors`: there is
            none.
    """
    limit = HEADER_LIMIT if limit is None else limit
    prefix = read(0, 8)
    if len(prefix) < 8:
        raise _broken(name, f"expected a header length in its first 8 bytes, found {len(prefix)} bytes")
    (size,) = struct.unpack("<Q", prefix)
    if size > length - 8:
        raise _broken(name, f"expected a header of at most {length - 8} bytes, its first 8 bytes say more")
    if size > limit:
        message = f"{name}: a header may have {limit} bytes, found more"
        raise UpdateError("header-too-large", message, status=413, limit=limit)
    return read(8, size)


def described_tensors(header: bytes, length: int, name: str, most: int | None = None) -> list[StoredTensor]:
    """Return every tensor that a header describes, at `most` so many. `length`: bytes of the file or body.

    Raises:
        UpdateError: `too-many-tensors`, `duplicate-tensor`, or `broken-safetensors` saying what was expected and found.
    """
    size, entries = len(header), _entries(header, name)
    if most is not None and len(entries) > most:
        raise too_many(len(entries), most, name)
    tensors = [_tensor(entry, 8 + size, described, name) for entry, described in entries.items()]
    position = 8 + size
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.size)):
        if tensor.start != position:
            raise _broken(
                name,
                f"{tensor.spec.name:.{_SHOWN}} should begin at byte {position}, its offsets say {tensor.start}",
            )
        position += tensor.size
    if position != length:
        raise _broken(name, f"expected {position} bytes, as its header says, found {length}")
    return tensors


def _entries(header: bytes, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # a lone surrogate could be told to nobody
        "".join(text for pair in pairs for text in pair if isinstance(text, str)).encode()
        entries = dict(pairs)
        if len(entries) != len(pairs):
            repeated = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            problems = [{"kind": "duplicate-tensor", "tensor": f"{key:.{_SHOWN}}"} for key in repeated]
            some = [problem["tensor"] for problem in problems[:8]]
            message = f"{name}: names that its header has twice: {some}"
            raise UpdateError("duplicate-tensor", message, status=422, **listed(problems))
        return entries

    try:
        entries = json.loads(header, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _broken(name, f"its header is not JSON ({type(error).__name__})") from None
    if not isinstance(entries, dict):
        raise _broken(name, f"its header should be an object, found {type(entries).__name__}")
    entries.pop("__metadata__", None)
    return entries


def too_many(count: int, most: int, what: str) -> UpdateError:
    """For a body that names more tensors than there can be."""
    message = (
        f"{what} names {count} tensors: expected at most {most}, all forms in which they may come counted"
    )
    return UpdateError("too-many-tensors", message, status=413, limit=most)


def require_names(tensors: Iterable[StoredTensor], of: str) -> None:
    """Raises `UpdateError` (`invalid-name`) for names that no tensor of a model has."""
    wrong = [tensor.spec.name for tensor in tensors if not _NAME.fullmatch(tensor.spec.name)]
    if wrong:
        problems = [{"kind": "invalid-name", "tensor": f"{name:.{_SHOWN}}"} for name in wrong]
        message = (
            f"{of}: expected names of 1 to 512 characters without control characters, found {wrong[0]!r:.200}"
        )
        raise UpdateError("invalid-name", message, status=422, **listed(problems))


def _tensor(key: str, first: int, entry: Any, name: str) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(shape, list) or len(shape) > _DIMENSIONS:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise _broken(name, f"{key:.{_SHOWN}}: expected dtype, shape and two data_offsets") from None
    sizes = (*shape, start, stop)
    if (
        not isinstance(dtype, str)
        or len(dtype) > _DTYPE
        or not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes)
    ):
        raise _broken(name, f"{key:.{_SHOWN}}: expected a dtype's name and sizes that are not negative")
    item = _ITEM_BYTES.get(dtype)
    if stop < start or (item is not None and stop - start != math.prod(shape) * item):
        raise _broken(
            name, f"{key:.{_SHOWN}}: its header lies: {dtype} {shape} does not have {stop - start} bytes"
        )
    return StoredTensor(
        TensorSpec(key, tuple(shape), _TORCH_NAMES.get(dtype, dtype)), first + start, stop - start
    )


def _broken(name: str, message: str) -> UpdateError:
    return UpdateError("broken-safetensors", f"{name}: not a valid safetensors file: {message}", status=422)
