# SPDX-License-Identifier: Apache-2.0
"""Launches kernels of Triton in a fraction of the time that Triton takes for it.

Triton looks at every argument of every launch to find the kernel that it compiled for such arguments. In a step without CUDA
graphs that is most of what a kernel costs the host, and what a step of some hundred tokens waits for.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16
"""Bytes that Triton takes a pointer to be a multiple of, or not; and numbers likewise."""
MOST_KERNELS = 1024
"""Compiled kernels kept in the cache; a program has some dozens."""
_REGISTERS = 65536
"""Registers of a multiprocessor. ptxas takes the number that it is told, also where a block's threads cannot have so many."""


def compiled_as(number: int) -> str:
    """Return the kind of number for which Triton compiles a kernel: 1, multiples of 16, or all others."""
    return "1" if number == 1 else "of 16" if number % ALIGNED == 0 else "other"


class TritonLauncher:
    """Launches one function of Triton, by the kernel compiled for arguments like these.

    Its parameters are in this order: tensors, numbers by which kernels differ, numbers by which they do not (floats, or
    `do_not_specialize`), constants.
    """

    def __init__(self, function: Any, registers: int | None = None) -> None:
        """`registers`: that a thread may have. Where that is not said, ptxas may take so few, for more threads to a
        multiprocessor, that a thread loads one part after the other."""
        self._function, self._registers = function, registers
        self._kernels: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor],
        numbers: tuple[int, ...],
        others: tuple[float, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        """On the current stream of the current device, where the tensors are. `grid`: three numbers. On a GPU the kernel may
        begin before those ahead have ended: it waits for them itself."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = [address % ALIGNED == 0 for address in addresses]
        device = tensors[0].get_device()
        key = (device, numbers, constants, warps, *aligned, *[tensor.dtype for tensor in tensors])
        kernel = self._kernels.get(key)
        if kernel is not None:
            # of a tensor Triton asks the driver whether a GPU may read it
            kernel[grid](*addresses, *numbers, *others, *constants)
            return
        options: dict[str, Any] = {"num_warps": warps}
        if tensors[0].is_cuda:
            options |= {"launch_pdl": True}
            if self._registers is not None:
                options["maxnreg"] = min(self._registers, _REGISTERS // (32 * warps))
        kernel = self._function[grid](*tensors, *numbers, *others, *constants, **options)
        # it was loaded on the current device; in Triton's interpreter there is none
        if kernel is not None and (device < 0 or device == torch.cuda.current_device()):
            if len(self._kernels) == MOST_KERNELS:
                self._kernels.clear()
            self._kernels[key] = kernel
