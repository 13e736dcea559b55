# SPDX-License-Identifier: Apache-2.0
"""Kernels of CUDA C++, loaded and launched by the driver through ctypes; `nvrtc` compiles them.

Nothing is loaded at import. Kernels live as long as the process.
"""

import ctypes
import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any

MOST_SHARED_BYTES = 227 * 1024
"""Shared memory that one block can have on Hopper."""

_MAX_DYNAMIC_SHARED, _SHARED_CARVEOUT, _ANY_CLUSTER_SIZE = 8, 9, 14
_CLUSTER, _PROGRAMMATIC = 4, 6
"""Values of CUfunction_attribute and CUlaunchAttributeID (cuda.h)."""
_ALIGNED = 16
"""Bytes of which the address of an argument is a multiple."""


class CudaError(RuntimeError):
    """The driver or NVRTC refused something."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class TensorMap(ctypes.Structure):
    """A CUtensorMap: 128 bytes, of which the copy engine wants an address that is a multiple of 64."""

    _fields_ = (("opaque", ctypes.c_ulonglong * 16),)


class Kernel:
    """One loaded kernel of the current device; `cluster`: blocks of a cluster."""

    def __init__(self, machine_code: bytes, name: str, threads: int, cluster: int) -> None:
        self.threads, self.cluster = threads, cluster
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._resident: dict[int, int] = {}
        call("cuModuleLoadData", ctypes.byref(self._module), machine_code)
        call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, MOST_SHARED_BYTES)
        # the same share for all: kernels of different shares cannot run on one multiprocessor at once
        call("cuFuncSetAttribute", self._function, _SHARED_CARVEOUT, 100)
        if cluster > 8:
            call("cuFuncSetAttribute", self._function, _ANY_CLUSTER_SIZE, 1)

    def resident_blocks(self, shared_bytes: int) -> int:
        """Blocks with so much shared memory that the device runs at once."""
        if shared_bytes not in self._resident:
            count = ctypes.c_int()
            launch, _keep = self._launch(self.cluster, shared_bytes, 0, (self._cluster_attribute(),))
            call("cuOccupancyMaxActiveClusters", ctypes.byref(count), self._function, ctypes.byref(launch))
            self._resident[shared_bytes] = count.value * self.cluster
        return self._resident[shared_bytes]

    def launch(
        self, blocks: int, shared_bytes: int, stream: int, arguments: Sequence[Any], *, early: bool = False
    ) -> None:
        """Queue the kernel on a stream.

        `arguments`: ctypes values, in order. `early`: start before the previous kernel of the stream has ended; the kernel
        itself waits where it must.
        """
        launch, _keep = self._described(early=early)
        launch.grid[0], launch.shared_bytes, launch.stream = blocks, shared_bytes, stream
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        call("cuLaunchKernelEx", ctypes.byref(launch), self._function, pointers, None)

    def launcher(self, arguments: Sequence[str]) -> "CudaLauncher":
        """For launches by one thread at a time: it makes what they need once, which takes longer than a launch. `arguments`:
        each as `struct` names it, with C's alignment; several values are a structure."""
        return CudaLauncher(
            self._function, [self._described(early=early) for early in (False, True)], arguments
        )

    def _described(self, *, early: bool) -> tuple[_Launch, ctypes.Array[_Attribute]]:
        attributes = [self._cluster_attribute()]
        if early:
            attributes.append(_Attribute(_PROGRAMMATIC, 0, (1,)))
        return self._launch(1, 0, 0, attributes)

    def _cluster_attribute(self) -> _Attribute:
        return _Attribute(_CLUSTER, 0, (self.cluster, 1, 1))

    def _launch(
        self, blocks: int, shared_bytes: int, stream: int, attributes: Sequence[_Attribute]
    ) -> tuple[_Launch, ctypes.Array[_Attribute]]:
        array = (_Attribute * len(attributes))(*attributes)
        grid, block = (blocks, 1, 1), (self.threads, 1, 1)
        return _Launch(grid, block, shared_bytes, stream, array, len(attributes)), array


class CudaLauncher:
    """Launches one kernel, time and again, from memory that is its own."""

    def __init__(
        self,
        function: ctypes.c_void_p,
        described: Sequence[tuple[_Launch, ctypes.Array[_Attribute]]],
        arguments: Sequence[str],
    ) -> None:
        self._function, self._described = function, described
        form, places, end = "@", [], 0
        for argument in arguments:
            places.append(-(-end // _ALIGNED) * _ALIGNED)
            form += f"{places[-1] - end}x{argument}"
            end = struct.calcsize(form)
        self._pack = struct.Struct(form).pack_into
        self._memory = ctypes.create_string_buffer(end + _ALIGNED)
        start = ctypes.addressof(self._memory)
        self._pointers = (ctypes.c_void_p * len(places))(*(start + place for place in places))

    def __call__(
        self, blocks: int, shared_bytes: int, stream: int, values: Iterable[float], *, early: bool
    ) -> None:
        """As `Kernel.launch`; `values`: of all arguments, one after the other, addresses as numbers."""
        self._pack(self._memory, 0, *values)
        launch = self._described[early][0]
        launch.grid[0], launch.shared_bytes, launch.stream = blocks, shared_bytes, stream
        call("cuLaunchKernelEx", ctypes.byref(launch), self._function, self._pointers, None)


def byte_matrix_map(address: int, shape: tuple[int, int], pitch: int, box: tuple[int, int]) -> TensorMap:
    """Describe a matrix of bytes for copies into shared memory with the 128-byte swizzle.

    `shape`: rows and columns. `pitch`: bytes between rows. `box`: rows and columns of a copy. What lies outside the matrix is
    read as zeros."""
    storage = (ctypes.c_byte * (ctypes.sizeof(TensorMap) + 64))()
    tensor_map = TensorMap.from_buffer(storage, -ctypes.addressof(storage) % 64)
    uint8, no_interleave, swizzle_128, promote_256, zeros = 0, 0, 3, 3, 0
    call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(tensor_map),
        uint8,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_ulonglong * 2)(shape[1], shape[0]),
        (ctypes.c_ulonglong * 1)(pitch),
        (ctypes.c_uint * 2)(box[1], box[0]),
        (ctypes.c_uint * 2)(1, 1),
        no_interleave,
        swizzle_128,
        promote_256,
        zeros,
    )
    return tensor_map


def call(function: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        CudaError: it failed, or there is no driver.
    """
    _call(_driver(), function, *arguments)


def allocation_of(address: int) -> tuple[int, int]:
    """Begin and bytes of the allocation that an address of the current device lies in.

    Raises:
        CudaError: in none.
    """
    base, size = ctypes.c_ulonglong(), ctypes.c_size_t()
    arguments = ctypes.byref(base), ctypes.byref(size), ctypes.c_ulonglong(address)
    _call(_driver(keeps_lock=True), "cuMemGetAddressRange_v2", *arguments)
    return base.value, size.value


def _call(driver: ctypes.CDLL, function: str, *arguments: Any) -> None:
    try:
        status = getattr(driver, function)(*arguments)
    except AttributeError:
        raise CudaError(f"{function}: this driver is too old") from None
    if status:
        message = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(message))
        raise CudaError(f"{function}: {(message.value or b'error').decode()} ({status})")


@functools.cache
def _driver(*, keeps_lock: bool = False) -> ctypes.CDLL:
    """`keeps_lock`: calls keep the interpreter's lock. They must take no time: to give it up and take it again costs a thread
    that computes beside more, when it is done hundreds of times."""
    try:
        return (ctypes.PyDLL if keeps_lock else ctypes.CDLL)("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"found no driver of CUDA: {error}") from None
