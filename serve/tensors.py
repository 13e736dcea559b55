# SPDX-License-Identifier: Apache-2.0
"""Tensors in memory, torch's or numpy's, as parts of a safetensors body. Imports neither torch nor numpy: a tensor of theirs
can only be there when they are."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_fp8ext.serve import safetensors_body
from vllm_fp8ext.update.contract.dtype_name import dtype_name, instance_of

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
"""Names of dtypes, the same in torch, numpy and ml_dtypes, and safetensors' names for them."""


MOST_PINNED_BYTES = 256 << 20
"""Largest tensor that is copied into page-locked memory: torch keeps locked, for the next copy, what was locked once."""


class TensorLike(Protocol):
    """A torch tensor or a numpy array."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class TensorPart:
    """A tensor wherever it is, on a GPU say. It is copied to host memory when it is fetched, and not before.

    `computed`: of one on a GPU, the CUDA event after which it has its values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    tensor: Any
    computed: Any = None

    def fetched(self) -> "HostPart":
        """The part in host memory: a view where the tensor is there already and contiguous, else a copy. On any thread."""
        tensor = self.tensor
        if _on_gpu(tensor):
            stream = sys.modules["torch"].cuda.Stream(tensor.device)
            stream.wait_event(self.computed)
            host, copied = _from_gpu(tensor, stream)
            copied.synchronize()
            tensor = host
        return HostPart(self.name, self.dtype, self.shape, memoryview(_host_bytes(tensor)))

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes, fetched anew."""
        return self.fetched().pieces()


class LentPart:
    """A tensor that is its owner's again once `keep` has returned.

    `stream`: of one on a GPU, the CUDA stream that its owner works on. The copy is made there, so that whatever the owner
    does to the tensor next waits for it.
    """

    def __init__(
        self, name: str, dtype: str, shape: tuple[int, ...], size: int, tensor: Any, stream: Any = None
    ) -> None:
        self.name, self.dtype, self.shape, self.size = name, dtype, shape, size
        self._tensor, self._stream = tensor, stream
        self._copied: Any = None

    def keep(self) -> None:
        """Copy the tensor to host memory; on a GPU the copy is only begun. Once, on any thread."""
        tensor, self._tensor = self._tensor, None
        if self._stream is not None:
            self._tensor, self._copied = _from_gpu(tensor, self._stream)
        else:
            self._tensor = _host_copy(tensor)

    def fetched(self) -> "HostPart":
        """The part in host memory, once it was kept: the copy is given away. Once, on any thread."""
        host, self._tensor = self._tensor, None
        if self._copied is not None:
            self._copied.synchronize()
        return HostPart(self.name, self.dtype, self.shape, memoryview(_host_bytes(host)))

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes, in place of `fetched`."""
        return self.fetched().pieces()


@dataclass(frozen=True)
class HostPart:
    """The bytes of a tensor in host memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def size(self) -> int:
        """Bytes."""
        return self.data.nbytes

    def fetched(self) -> "HostPart":
        """Itself."""
        return self

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes."""
        for start in range(0, self.size, safetensors_body.PIECE):
            yield self.data[start : start + safetensors_body.PIECE]


def never(tensor: Any) -> bool:
    """No tensor is lent."""
    return False


def tensor_parts(
    tensors: Iterable[tuple[str, TensorLike]],
    dtypes: Sequence[str],
    ignored: frozenset[str] = frozenset(),
    lent: Callable[[Any], bool] = never,
) -> Iterator[TensorPart | LentPart]:
    """A part for each tensor, made as it is asked for. A tensor on a GPU is taken to have its values once the current stream
    of its device has done what it was given so far.

    `dtypes`: names of those that are taken. `ignored`: names of tensors that nobody looks at, such as the output layer of a
    model that shares its embedding; they are left out. `lent`: whether a tensor is its owner's again when the next part is
    asked for; the part is to be kept before that.

    Raises:
        ValueError: what is no pair of a name and a tensor, no tensor with values of its own, or of another dtype.
    """
    for item in tensors:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ValueError(f"expected pairs of a name and a tensor, found {type(item).__name__}")
        name, tensor = item
        if name == "__metadata__":
            raise ValueError(f"expected a tensor's name, found {name}, which safetensors reserves")
        if name in ignored:
            continue
        dtype = dtype_name(name, tensor)
        if dtype not in dtypes or dtype not in DTYPES:
            raise ValueError(f"tensor {name}: expected dtype {' or '.join(dtypes)}, found {dtype}")
        shape = tuple(int(size) for size in tensor.shape)
        size = math.prod(shape) * tensor.dtype.itemsize
        stream = _current_stream(tensor)
        if lent(tensor):
            yield LentPart(name, DTYPES[dtype], shape, size, tensor, stream)
        else:
            computed = None if stream is None else stream.record_event()
            yield TensorPart(name, DTYPES[dtype], shape, size, tensor, computed)
        del item, tensor  # nothing holds a tensor while the next one is made


def _host_bytes(tensor: Any) -> Any:
    """Return a flat buffer over the values of a tensor on no GPU. They are in C order and little-endian."""
    if 0 in tensor.shape:
        return b""
    if instance_of(tensor, "torch", "Tensor"):
        dense = tensor.detach().cpu().contiguous()
        # not reshape: a dimension of size one may keep any stride and still count as contiguous
        return dense.as_strided((dense.numel(),), (1,)).view(sys.modules["torch"].uint8).numpy()
    if not tensor.dtype.isnative:
        tensor = tensor.astype(tensor.dtype.newbyteorder("="))
    if not tensor.flags.c_contiguous:
        tensor = tensor.copy(order="C")
    return tensor.reshape(-1).view("uint8")


def _host_copy(tensor: Any) -> Any:
    """A tensor of the same values in host memory that is nobody else's, copied once."""
    if instance_of(tensor, "torch", "Tensor"):
        host = tensor.detach().cpu().contiguous()
        return host.clone() if host.data_ptr() == tensor.data_ptr() else host
    return tensor.copy(order="C")


def _from_gpu(tensor: Any, stream: Any) -> tuple[Any, Any]:
    """Return a contiguous copy in host memory, and the event after which it is there. Page-locked where that is not too much,
    such copies run at the bus's speed, beside what is being computed."""
    torch = sys.modules["torch"]
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.nbytes <= MOST_PINNED_BYTES)
    with torch.cuda.stream(stream):
        host.copy_(tensor.detach(), non_blocking=True)
        return host, stream.record_event()


def _current_stream(tensor: Any) -> Any:
    """Return the current stream of a tensor's GPU; None of a tensor elsewhere."""
    return sys.modules["torch"].cuda.current_stream(tensor.device) if _on_gpu(tensor) else None


def _on_gpu(tensor: Any) -> bool:
    return instance_of(tensor, "torch", "Tensor") and bool(tensor.is_cuda)
