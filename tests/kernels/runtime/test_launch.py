# SPDX-License-Identifier: Apache-2.0
"""`TritonLauncher` launches what Triton would launch.

Triton's own choice of a kernel, on a GPU that is not there, is the measure."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vllm_fp8ext.kernels.runtime.launch import TritonLauncher


class Gpu:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 7

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


class Kernel:
    """One that was compiled; knows how often it was launched, and how at last."""

    function, packed_metadata = 0, ()

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        self.launched.append(((x, y, z), *rest[5:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.launched.append((grid, *values))


class Compiled(JITFunction):
    """A function of Triton whose kernels are those above."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(function, **options)
        self.kernels: list[Kernel] = []

    def _do_compile(self, key: str, *_: Any, **__: Any) -> Kernel:
        self.kernels.append(Kernel())
        self.device_caches[0][0][key] = self.kernels[-1]
        return self.kernels[-1]


def body(x, y, N, row, free, epsilon, FLAG, SIZE):  # type: ignore[no-untyped-def]
    pass


body.__annotations__ = {"FLAG": triton.language.constexpr, "SIZE": triton.language.constexpr}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", Gpu())


def tensor(dtype: torch.dtype, offset: int) -> Tensor:
    """On a multiple of 16 bytes, and so much behind it."""
    raw = torch.empty(256, dtype=torch.uint8)
    start = -raw.data_ptr() % 16 + offset
    return raw[start : start + 64].view(dtype)


def _values(arguments: tuple[Any, ...]) -> list[Any]:
    """A kernel takes a tensor for its address."""
    return [one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]


# few of each, so that calls are often alike but for one of them
TENSORS = st.builds(tensor, st.sampled_from([torch.bfloat16, torch.float32]), st.sampled_from([0, 4]))
CALLS = st.tuples(
    st.tuples(TENSORS, TENSORS),
    st.tuples(st.sampled_from([1, 15, 16, 2**31]), st.just(16)),
    st.tuples(st.integers(0, 2**20), st.floats(0, 1)),
    st.tuples(st.booleans(), st.just(64)),
    st.sampled_from([1, 4]),
)


@settings(max_examples=200)
@given(calls=st.lists(CALLS, min_size=1, max_size=30))
def test_every_launch_is_tritons(calls: list[Any]) -> None:
    function = Compiled(body, do_not_specialize=["free"])
    launch = TritonLauncher(function)
    for call in calls + calls:
        tensors, numbers, others, (flag, size), warps = call
        launch((3, 2, 1), *call)
        function[3, 2, 1](*tensors, *numbers, *others, FLAG=flag, SIZE=size, num_warps=warps)
        taken = [kernel for kernel in function.kernels if kernel.launched]
        assert len(taken) == 1, "another kernel"
        ours, theirs = taken[0].launched
        assert ours[0] == theirs[0]
        assert _values(ours[1:]) == _values(theirs[1:])
        taken[0].launched.clear()


def test_kernels_are_remembered() -> None:
    """Triton is asked once for each kind of argument."""
    asked: list[Any] = []
    function = Compiled(body, do_not_specialize=["free"])

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            asked.append(grid)
            return function[grid]

    launch = TritonLauncher(Watched())
    even, askew = tensor(torch.bfloat16, 0), tensor(torch.bfloat16, 4)
    for free in range(5):
        launch((1, 1, 1), (even, even), (16, 4), (free, 1.0), (True, 64), 4)
    assert len(asked) == 1
    launch((1, 1, 1), (even, even), (16, 5), (0, 1.0), (True, 64), 4)
    assert len(asked) == 2
    for _ in range(3):
        launch((1, 1, 1), (even, askew), (16, 4), (0, 1.0), (True, 64), 4)
    assert len(asked) == 3
    launch((1, 1, 1), (askew, even), (16, 4), (0, 1.0), (True, 64), 4)
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("registers", "warps", "most"), [(None, 4, None), (128, 4, 128), (128, 16, 128), (128, 32, 64)]
)
def test_on_a_gpu_kernels_begin_early_and_have_the_registers_that_were_said(
    registers: int | None, warps: int, most: int | None
) -> None:
    """But no more than there are for so many threads."""
    given: list[dict[str, Any]] = []

    class Noting:
        def __getitem__(self, _grid: Any) -> Any:
            return lambda *_, **options: given.append(options)

    there = SimpleNamespace(
        data_ptr=lambda: 0, get_device=lambda: 0, dtype=torch.bfloat16, is_cuda=True
    )  # on a GPU that is not there
    TritonLauncher(Noting(), registers)((1, 1, 1), [there], (), (), (), warps)  # type: ignore[list-item]  # as much of one
    said = {} if most is None else {"maxnreg": most}
    assert given == [{"num_warps": warps, "launch_pdl": True} | said]
