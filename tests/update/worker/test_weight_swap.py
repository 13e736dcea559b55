# SPDX-License-Identifier: Apache-2.0
"""The exchange, and every place where a copy can fail in it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_fp8ext.update.worker import weight_swap
from vllm_fp8ext.update.worker.weight_swap import WeightSwap

WORKSPACE = 100
"""Bytes: less than most tensors below, and no multiple of their sizes."""


class CopyFailure(RuntimeError):
    """What the failing copy raises."""


class FailAt(TorchDispatchMode):
    """Lets the copies of these indexes fail, after they ruined their destination."""

    def __init__(self, *indexes: int) -> None:
        super().__init__()
        self.indexes = indexes
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        index = self.copies
        self.copies += 1
        if index in self.indexes:
            args[0].fill_(0xAA)
            raise CopyFailure(f"copy {index}")
        return func(*args, **(kwargs or {}))


def make_pairs() -> list[tuple[Tensor, Tensor]]:
    """Parameters of all the dtypes that are served, a scalar among them."""
    noise = torch.Generator().manual_seed(0)

    def side() -> list[Tensor]:
        values = [torch.randn(size, generator=noise) for size in ((13, 9), (3, 3), (50,), ())]
        return [values[0].to(torch.float8_e4m3fn), values[1], values[2].bfloat16(), values[3]]

    return list(zip(side(), side(), strict=True))


def contents(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def sides(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[bytes], list[bytes]]:
    return contents([live for live, _ in pairs]), contents([shadow for _, shadow in pairs])


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    monkeypatch.setattr(weight_swap, "_WORKSPACE_BYTES", WORKSPACE)
    return make_pairs()


def counted(work: Callable[[], None]) -> int:
    """Copies that the work does."""
    with FailAt() as mode:
        work()
    return mode.copies


def test_contents_are_swapped_and_addresses_stay(pairs: list[tuple[Tensor, Tensor]]) -> None:
    live, shadow = sides(pairs)
    addresses = [(a.data_ptr(), b.data_ptr()) for a, b in pairs]
    swap = WeightSwap(pairs)
    assert swap.bytes == 13 * 9 + 9 * 4 + 50 * 2 + 4
    slices = 2 + 1 + 1 + 1
    assert counted(swap.run) == 3 * slices
    assert sides(pairs) == (shadow, live)
    assert [(a.data_ptr(), b.data_ptr()) for a, b in pairs] == addresses
    swap.run()
    assert sides(pairs) == (live, shadow)
    assert not swap.broken


@pytest.mark.parametrize("workspace", [1, 7, 64, 117, 1 << 20])
def test_any_workspace_does(monkeypatch: pytest.MonkeyPatch, workspace: int) -> None:
    monkeypatch.setattr(weight_swap, "_WORKSPACE_BYTES", workspace)
    pairs = make_pairs()
    live, shadow = sides(pairs)
    WeightSwap(pairs).run()
    assert sides(pairs) == (shadow, live)


def test_nothing_to_exchange_is_no_error() -> None:
    swap = WeightSwap([])
    swap.run()
    assert swap.bytes == 0


def test_strided_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        WeightSwap([(torch.zeros(4, 3).T, torch.zeros(3, 4))])


@pytest.mark.parametrize("index", range(15))
def test_a_failed_copy_is_undone(pairs: list[tuple[Tensor, Tensor]], index: int) -> None:
    before = sides(pairs)
    swap = WeightSwap(pairs)
    with FailAt(index), pytest.raises(CopyFailure, match=f"copy {index}$"):
        swap.run()
    assert sides(pairs) == before
    assert not swap.broken
    swap.run()
    assert sides(pairs) == before[::-1]


@pytest.mark.parametrize("index", range(15))
def test_a_failed_undo_is_told(pairs: list[tuple[Tensor, Tensor]], index: int) -> None:
    """Whichever copy of the undoing fails, the exchange says that its contents can't be trusted."""
    swap = WeightSwap(pairs)
    with FailAt(index) as mode, pytest.raises(CopyFailure):
        swap.run()
    undoing = mode.copies - index - 1
    whole, part = divmod(index, 3)
    assert undoing == 3 * whole + part
    for failing in range(undoing):
        fresh = WeightSwap(make_pairs())
        with FailAt(index, index + 1 + failing), pytest.raises(CopyFailure):
            fresh.run()
        assert fresh.broken


def test_a_complete_run_mends_a_broken_exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """A full update heals a poisoned engine. A failure after that is an ordinary one, if it can be undone."""
    swap = WeightSwap(pairs)
    with FailAt(5, 6), pytest.raises(CopyFailure):
        swap.run()
    assert swap.broken
    for (live, shadow), (good, better) in zip(pairs, make_pairs(), strict=True):
        live.copy_(good)
        shadow.copy_(better)
    swap.run()
    before = sides(pairs)
    with FailAt(4), pytest.raises(CopyFailure):
        swap.run()
    assert sides(pairs) == before
    assert not swap.broken


def test_fingerprints_tell_contents_apart() -> None:
    pairs = [(torch.arange(300.0), torch.zeros(300)), (torch.ones(7).bfloat16(), torch.zeros(7).bfloat16())]
    swapped = WeightSwap(pairs)
    live, shadow = swapped.fingerprint(shadow=False), swapped.fingerprint(shadow=True)
    assert live != shadow
    swapped.run()
    assert (swapped.fingerprint(shadow=False), swapped.fingerprint(shadow=True)) == (shadow, live)
    pairs[1][0].view(torch.uint8)[3] ^= 1
    assert swapped.fingerprint(shadow=False) != shadow


@pytest.mark.parametrize("inplace", [False, True])
def test_what_came_back_without_its_contents_is_zero(
    pairs: list[tuple[Tensor, Tensor]], inplace: bool
) -> None:
    """No update brings padding, with which kernels compute."""
    pairs = [(live, live) for live, _ in pairs] if inplace else pairs
    WeightSwap(pairs, inplace=inplace).restore()
    assert not any(any(content) for side in sides(pairs) for content in side)


def test_in_place_there_is_nothing_to_swap() -> None:
    pairs = [(live, live) for live, _ in make_pairs()]
    before = sides(pairs)
    swap = WeightSwap(pairs, inplace=True)
    with FailAt(0):
        swap.run()
    assert sides(pairs) == before
    assert swap.bytes == 0
    assert swap.fingerprint(shadow=True) == swap.fingerprint(shadow=False)
