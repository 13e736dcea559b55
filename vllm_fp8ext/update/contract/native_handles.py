# SPDX-License-Identifier: Apache-2.0
"""CUDA IPC handles of vLLM's weight transfer, as plain data that is checked. Needs neither torch nor vLLM.

A handle is what `torch.multiprocessing.reductions.reduce_tensor` tells of a tensor on a GPU: 15 arguments of
`rebuild_cuda_tensor`. Here it is an object with the fields of `FIELDS`, whose bytes are base64. vLLM's HTTP client pickles
handles: `unpickled` reads such a pickle as data, and executes nothing of it.
"""

import base64
import binascii
import io
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.native_info import ITEM_BYTES, invalid, spec_bytes

_ARGUMENTS = 15
FIELDS = {
    "shape": 1,
    "strides": 2,
    "offset": 3,
    "dtype": 5,
    "handle": 7,
    "storage_bytes": 8,
    "storage_offset": 9,
    "counter": 11,
    "counter_offset": 12,
    "event": 13,
    "wait": 14,
}
"""Fields of a handle, and which argument of `rebuild_cuda_tensor` each is.

`offset`: elements from the begin of the storage on. `storage_offset`: bytes from the begin of the allocation on.
`counter`, `counter_offset`: name of shared memory, and a place there, where the trainer counts who reads. `event`, `wait`: an
event after which the tensor is written, and whether it has to be waited for.
"""
_CLASSES = {
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
}
_COUNTER = re.compile(r"/?torch_[0-9]{1,10}_[0-9]{1,20}_[0-9]{1,20}|")
_HANDLE_BYTES = (64, 66)
_EVENT_BYTES = 64
_COUNTERS = 10_000
"""Counters in one piece of shared memory, as torch makes it."""
_MOST_GPUS = 1024
_MOST_BYTES = 1 << 48
_UUID = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class ExportedTensor:
    """A tensor's bytes in memory of a trainer's GPU: `size` bytes from byte `start` of a storage on."""

    handle: str
    """The allocation's IPC handle as torch makes it, in base64."""
    storage_bytes: int
    storage_offset: int
    counter: str
    counter_offset: int
    event: str
    """IPC handle of an event, in base64."""
    wait: bool
    start: int
    size: int


def typed(info: Any, *, read_pickles: bool) -> Any:
    """Return an `update_info` whose handles are plain data, whatever way they came; others are returned as they are.

    Handles come typed, as they are made (a call in the engine's own process), or pickled by vLLM's HTTP client.

    Raises:
        UpdateError: `pickled-handles`, unless they are to be read. `invalid-request`: something else is pickled.
    """
    if isinstance(info, list):
        return [typed(part, read_pickles=read_pickles) for part in info]
    if not isinstance(info, Mapping):
        return info
    fields = {
        name: value for name, value in info.items() if value is not None or name != "ipc_handles_pickled"
    }
    if "ipc_handles_pickled" in fields:
        if fields.get("ipc_handles") is not None:
            raise invalid("update_info: expected ipc_handles or ipc_handles_pickled, found both")
        if not read_pickles:
            message = (
                "ipc_handles_pickled: expected typed ipc_handles, found a pickle: send them by "
                "vllm_fp8ext.serve.adapters.vllm.WeightSyncClient, or set native_pickled_handles"
            )
            raise UpdateError("pickled-handles", message, status=422)
        fields["ipc_handles"] = unpickled(fields.pop("ipc_handles_pickled"))
    if fields.get("ipc_handles") is not None:
        fields["ipc_handles"] = plain(fields["ipc_handles"])
    return fields


def plain(handles: Any) -> Any:
    """Return `ipc_handles` whose tuples of arguments are objects of `FIELDS`; what is none is returned as it is."""
    if isinstance(handles, list):
        return [plain(one) for one in handles]
    if not isinstance(handles, Mapping):
        return handles
    return {gpu: _fields(value) if isinstance(value, tuple) else value for gpu, value in handles.items()}


def _fields(arguments: tuple[Any, ...]) -> dict[str, Any]:
    if len(arguments) != _ARGUMENTS:
        raise invalid(f"ipc_handles: expected {_ARGUMENTS} arguments of a tensor, found {len(arguments)}")
    fields = {name: arguments[index] for name, index in FIELDS.items()}
    shape, strides = fields["shape"], fields["strides"]
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise invalid("ipc_handles: expected tuples as shape and strides of a tensor")
    counter = fields["counter"]
    return {
        **fields,
        "shape": list(shape),
        "strides": list(strides),
        "dtype": str(fields["dtype"]).removeprefix("torch."),
        "handle": _text(fields["handle"]),
        "counter": counter.decode("ascii", "replace") if isinstance(counter, bytes) else counter,
        "event": _text(fields["event"]),
        "wait": bool(fields["wait"]),
    }


def _text(content: Any) -> Any:
    return base64.b64encode(content).decode() if isinstance(content, bytes) else content


class _DataUnpickler(pickle.Unpickler):
    """Reads a pickle of handles. Names of torch's that they hold become text; no other is looked up, none is imported."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name: text, and for `torch.Size` the tuple that it is."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) in _CLASSES or (module == "torch" and name in ITEM_BYTES):
            return name
        raise pickle.UnpicklingError(f"found {module[:50]}.{name[:50]}")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse."""
        raise pickle.UnpicklingError("found a persistent id")


def unpickled(text: Any) -> Any:
    """Return the handles in a pickle in base64. Nothing of it is executed.

    Raises:
        UpdateError: `invalid-request`: it holds something else.
    """
    if not isinstance(text, str):
        raise invalid("ipc_handles_pickled: expected text in base64")
    try:
        return _DataUnpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    except Exception as error:
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else "found something else"
        raise invalid(f"ipc_handles_pickled: expected a pickle of CUDA IPC handles: {reason}") from None


def exported(
    handles: Any, specs: Sequence[TensorSpec], *, packed: bool, sizes: Any
) -> dict[str, list[ExportedTensor]]:
    """Return where these tensors are, by the UUID of a GPU: each has all of them.

    `handles`: `ipc_handles` of an `update_info`; `packed`: one for all, whose bytes are those of one tensor after the other;
    `sizes`: its `tensor_sizes`.

    Raises:
        UpdateError: `invalid-request`, `wrong-shape` or `wrong-dtype`, for what is told of a tensor in two ways.
    """
    if not packed:
        if sizes is not None:
            raise invalid("update_info: expected no tensor_sizes where packed is false")
        if not isinstance(handles, list) or len(handles) != len(specs):
            count = f"{len(handles)} of them" if isinstance(handles, list) else type(handles).__name__
            raise invalid(f"ipc_handles: expected a list of {len(specs)}, as many as names, found {count}")
        each = [_by_gpu(one, spec.name) for one, spec in zip(handles, specs, strict=True)]
        gpus = each[0].keys() if each else ()
        for one, spec in zip(each, specs, strict=True):
            if one.keys() != gpus:
                raise invalid(
                    f"ipc_handles: tensor {spec.name}: expected the GPUs of the first, found {sorted(one)}"
                )
        return {gpu: [_handle(one[gpu], spec) for one, spec in zip(each, specs, strict=True)] for gpu in gpus}
    wanted = [spec_bytes(spec) for spec in specs]
    if sizes != wanted:
        raise invalid(
            f"tensor_sizes: expected {_some(wanted)}, as shapes and dtypes say, found {_some(sizes)}"
        )
    return {gpu: _parts(gpu, value, wanted) for gpu, value in _by_gpu(handles, "the buffer").items()}


def _some(sizes: Any) -> str:
    return repr(sizes)[:100]


def _by_gpu(handles: Any, name: str) -> dict[str, Mapping[str, Any]]:
    if not isinstance(handles, Mapping) or not 0 < len(handles) <= _MOST_GPUS:
        raise invalid(
            f"ipc_handles: {name}: expected a handle by the UUID of its GPU, found {_some(handles)}"
        )
    for gpu, value in handles.items():
        if not isinstance(gpu, str) or not _UUID.fullmatch(gpu):
            raise invalid(f"ipc_handles: {name}: expected the UUID of a GPU, found {_some(gpu)}")
        if not isinstance(value, Mapping) or value.keys() != FIELDS.keys():
            raise invalid(f"ipc_handles: {name}: expected {', '.join(FIELDS)}, found {_some(value)}")
    return dict(handles)


def _parts(gpu: str, value: Mapping[str, Any], sizes: Sequence[int]) -> list[ExportedTensor]:
    """Return the parts of a packed buffer."""
    shape = value["shape"]
    if not isinstance(shape, list) or len(shape) != 1 or not _whole(shape[0]):
        raise invalid(f"ipc_handles: the buffer: expected one dimension of bytes, found {_some(shape)}")
    buffer = _handle(value, TensorSpec("the buffer", (shape[0],), "uint8"))
    parts, start = [], buffer.start
    for size in sizes:
        parts.append(ExportedTensor(**{**vars(buffer), "start": start, "size": size}))
        start += size
    if start > buffer.start + buffer.size:
        raise invalid(
            f"tensor_sizes: expected {buffer.size} bytes at most, the buffer on GPU {gpu}, found {start - buffer.start}"
        )
    return parts


def _handle(value: Mapping[str, Any], spec: TensorSpec) -> ExportedTensor:
    """Check one handle against what is told of its tensor."""
    name = spec.name
    for field, kind in (("shape", list), ("strides", list), ("dtype", str), ("counter", str), ("wait", bool)):
        if not isinstance(value[field], kind):
            raise invalid(
                f"ipc_handles: {name}: {field}: expected {kind.__name__}, found {_some(value[field])}"
            )
    if value["dtype"] != spec.dtype:
        raise _differs("wrong-dtype", name, spec.dtype, value["dtype"])
    if value["shape"] != list(spec.shape):
        raise _differs("wrong-shape", name, list(spec.shape), value["shape"])
    if not _is_dense(value["shape"], value["strides"]):
        raise invalid(
            f"ipc_handles: {name}: expected dense rows of shape {value['shape']}, found strides {_some(value['strides'])}"
        )
    for field in ("offset", "storage_bytes", "storage_offset", "counter_offset"):
        if not _whole(value[field]):
            raise invalid(f"ipc_handles: {name}: {field}: expected a number, found {_some(value[field])}")
    size, start = spec_bytes(spec), value["offset"] * ITEM_BYTES[spec.dtype]
    if start + size > value["storage_bytes"]:
        raise invalid(
            f"ipc_handles: {name}: {size} bytes from {start} on do not lie in a storage of {value['storage_bytes']} bytes"
        )
    if not _COUNTER.fullmatch(value["counter"]) or value["counter_offset"] >= _COUNTERS:
        raise invalid(f"ipc_handles: {name}: expected a counter of torch's, found {_some(value['counter'])}")
    if _length(value["handle"]) not in _HANDLE_BYTES:
        raise invalid(
            f"ipc_handles: {name}: expected a handle of memory by cudaMalloc (PYTORCH_CUDA_ALLOC_CONF without "
            f"expandable_segments), found {_some(value['handle'])}"
        )
    if _length(value["event"]) != _EVENT_BYTES:
        raise invalid(f"ipc_handles: {name}: expected an event of 64 bytes, found {_some(value['event'])}")
    told = ("handle", "storage_bytes", "storage_offset", "counter", "counter_offset", "event", "wait")
    return ExportedTensor(**{field: value[field] for field in told}, start=start, size=size)


def _differs(kind: str, name: str, expected: Any, value: Any) -> UpdateError:
    message = f"tensor {name}: expected {expected}, as update_info says, found {_some(value)} in its handle"
    problem = {"kind": kind, "tensor": name, "expected": expected, "found": value}
    return UpdateError(kind, message, status=422, problems=[problem])


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_BYTES


def _length(text: Any) -> int:
    """Return the bytes of base64, or -1."""
    try:
        return len(base64.b64decode(text, validate=True)) if isinstance(text, str) else -1
    except (binascii.Error, ValueError):
        return -1


def _is_dense(shape: Sequence[int], strides: Sequence[Any]) -> bool:
    """Tell whether elements lie one after the other; what has none, or is one long, may have any stride."""
    if len(shape) != len(strides) or not math.prod(shape):
        return len(shape) == len(strides)
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True
