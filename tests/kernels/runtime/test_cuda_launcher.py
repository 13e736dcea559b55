# SPDX-License-Identifier: Apache-2.0
"""What a launcher tells the driver, which a kernel reads as C lays it out."""

import ctypes
import struct
from typing import Any

import pytest

from vllm_fp8ext.kernels.runtime import cuda_kernel


class Structure(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("count", ctypes.c_uint), ("stride", ctypes.c_ulonglong))


class Short(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint), ("scale", ctypes.c_float))


ARGUMENTS = ("P", "I", "PIQ", "f", "If", "Q")
EXPECTED = (
    *(ctypes.c_void_p(1 << 40), ctypes.c_uint(7), Structure(5, 6, 1 << 33)),
    *(ctypes.c_float(0.1), Short(3, 2.5), ctypes.c_ulonglong(9)),
)
VALUES = (1 << 40, 7, 5, 6, 1 << 33, 0.1, 3, 2.5, 9)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver was told of each launch: the launch, the function and what it read of each argument."""
    calls: list[Any] = []

    def call(name: str, launch: Any, function: Any, pointers: Any, extra: None) -> None:
        assert name == "cuLaunchKernelEx"
        given = launch._obj
        attributes = [(one.id, list(one.value[:3])) for one in given.attributes[: given.attribute_count]]
        read = [
            ctypes.string_at(pointer, ctypes.sizeof(value))
            for pointer, value in zip(pointers, EXPECTED, strict=True)
        ]
        calls.append(
            (
                (*given.grid,),
                (*given.block,),
                given.shared_bytes,
                given.stream,
                attributes,
                function.value,
                read,
            )
        )

    monkeypatch.setattr(cuda_kernel, "call", call)
    return calls


def test_arguments_lie_as_c_lays_them_out(told: list[Any]) -> None:
    kernel = cuda_kernel.Kernel.__new__(cuda_kernel.Kernel)  # what needs a GPU is left out
    kernel.threads, kernel.cluster, kernel._function = 256, 2, ctypes.c_void_p(77)
    launch = kernel.launcher(ARGUMENTS)
    launch(12, 1000, 55, VALUES, early=False)
    launch(13, 2000, 0, (*VALUES[:-1], 10), early=True)
    launch(12, 1000, 55, VALUES, early=False)
    cluster, programmatic = (cuda_kernel._CLUSTER, [2, 1, 1]), (cuda_kernel._PROGRAMMATIC, [1, 0, 0])
    first, second, third = told
    expected = [bytes(value) for value in EXPECTED]
    assert first == ((12, 1, 1), (256, 1, 1), 1000, 55, [cluster], 77, expected)
    changed = [*expected[:-1], bytes(ctypes.c_ulonglong(10))]
    assert second == ((13, 1, 1), (256, 1, 1), 2000, None, [cluster, programmatic], 77, changed)
    assert third == first
    kernel.launch(12, 1000, 55, EXPECTED)
    assert told[3] == first


def test_values_of_another_number_are_refused() -> None:
    kernel = cuda_kernel.Kernel.__new__(cuda_kernel.Kernel)
    kernel.threads, kernel.cluster, kernel._function = 256, 1, ctypes.c_void_p(77)
    with pytest.raises(struct.error, match="expected 9 items"):
        kernel.launcher(ARGUMENTS)(1, 0, 0, VALUES[:-1], early=False)
