# SPDX-License-Identifier: Apache-2.0
"""Every copy of a scale changes, or none; ranks know which heads are theirs."""

import hashlib
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from update.layers import CPU, copies, layers, of_ranks, scales
from vllm_fp8ext.kv_types import NAMES, HeadShare, scale_digests
from vllm_fp8ext.update.contract.kv_merge import largest
from vllm_fp8ext.update.worker.kv_buffers import KvScaleBuffers

OLD = {"a": [1.0], "b": [1.0]}
NEW = scales(a=0.5, b=0.1)
TENTH = float(torch.tensor(0.1))
"""As fp32 has it."""


@pytest.fixture
def here() -> dict[str, Any]:
    return layers("a", "b")


@pytest.fixture
def kv(here: dict[str, Any]) -> KvScaleBuffers:
    return KvScaleBuffers(here, {}, device=CPU)


def everything(here: dict[str, Any], kv: KvScaleBuffers) -> list[Any]:
    result: list[Any] = [copies(layer, kind) for layer in here.values() for kind in NAMES]
    staged = [kv.staged(name, kind).tolist() for name in here for kind in NAMES]
    return [
        result,
        staged,
        kv.served(),
        kv.fingerprint(shadow=False),
        kv.fingerprint(shadow=True),
        kv.ratios(),
    ]


def test_an_exchange_changes_every_copy_and_moves_none(here: dict[str, Any], kv: KvScaleBuffers) -> None:
    before = {
        (name, kind): getattr(here[name], f"_{kind}_scale").data_ptr() for name in here for kind in NAMES
    }
    assert len(set(before.values())) == 6
    kv.stage(NEW)
    assert copies(here["a"], "k").device == 1.0
    kv.swap()
    for name, value in (("a", 0.5), ("b", TENTH)):
        for kind in NAMES:
            result = copies(here[name], kind)
            assert (result.device, result.number, result.host) == (
                value,
                value,
                None if kind == "q" else value,
            )
            buffer = getattr(here[name], f"_{kind}_scale")
            assert (buffer.data_ptr(), buffer.shape) == (before[name, kind], ())
            assert buffer is dict(here[name].named_buffers())[f"_{kind}_scale"]
    assert kv.served() == scales(a=0.5, b=TENTH)


def test_an_exchange_is_its_own_inverse(here: dict[str, Any], kv: KvScaleBuffers) -> None:
    kv.stage(NEW)
    before = everything(here, kv)
    kv.swap()
    between = everything(here, kv)
    assert between != before
    kv.swap()
    assert everything(here, kv) == before


def test_the_checkpoints_scales_are_those_that_are_served_first() -> None:
    here = layers("a", served=0.1)
    kv = KvScaleBuffers(here, {}, device=CPU)
    assert kv.served() == scales(a=TENTH)
    assert copies(here["a"], "v").number == TENTH
    assert kv.staged("a", "k").tolist() == [TENTH]


class Fails:
    """A host copy whose n-th write fails, and so many that follow."""

    def __init__(self, first: int, last: int) -> None:
        self.value, self.calls, self.range = torch.tensor(1.0), 0, range(first, last + 1)

    def fill_(self, value: float) -> None:
        self.calls += 1
        if self.calls in self.range:
            raise RuntimeError("no memory")
        self.value.fill_(value)

    def __float__(self) -> float:
        return float(self.value)


@pytest.mark.parametrize("layer", ["a", "b"])
@pytest.mark.parametrize("kind", ["k", "v"])
def test_a_failure_half_way_is_undone(
    here: dict[str, Any], kv: KvScaleBuffers, layer: str, kind: str
) -> None:
    setattr(here[layer], f"_{kind}_scale_cpu", Fails(1, 1))
    kv.stage(NEW)
    before = everything(here, kv)
    with pytest.raises(RuntimeError, match="no memory"):
        kv.swap()
    assert everything(here, kv) == before
    assert not kv.broken
    kv.swap()
    assert kv.served() == scales(a=0.5, b=TENTH)


def test_what_can_not_be_undone_is_broken_until_an_exchange_succeeds(
    here: dict[str, Any], kv: KvScaleBuffers
) -> None:
    here["b"]._k_scale_cpu = Fails(1, 2)
    kv.stage(NEW)
    with pytest.raises(RuntimeError, match="no memory"):
        kv.swap()
    assert kv.broken
    kv.stage(NEW)
    kv.swap()
    assert not kv.broken
    assert kv.fingerprint(shadow=False) != -1


def test_lost_memory_is_written_again(here: dict[str, Any], kv: KvScaleBuffers) -> None:
    kv.stage(NEW)
    before = everything(here, kv)
    for layer in here.values():
        layer._k_scale.fill_(math.nan)
    kv.staged("a", "v").zero_()
    assert everything(here, kv) != before
    kv.restore()
    assert everything(here, kv) == before


@pytest.mark.parametrize("layer", ["a", "b"])
@pytest.mark.parametrize("kind", NAMES)
def test_a_fingerprint_sees_the_device(
    here: dict[str, Any], kv: KvScaleBuffers, layer: str, kind: str
) -> None:
    before = kv.fingerprint(shadow=False), kv.fingerprint(shadow=True)
    getattr(here[layer], f"_{kind}_scale").fill_(1.0000001)
    assert kv.fingerprint(shadow=False) != before[0]
    assert kv.fingerprint(shadow=True) == before[1]
    kv.staged(layer, kind).fill_(1.0000001)
    assert kv.fingerprint(shadow=True) != before[1]


@pytest.mark.parametrize("copy", ["_q_scale_float", "_k_scale_float", "_v_scale_float", "_k_scale_cpu"])
def test_a_fingerprint_sees_host_copies(here: dict[str, Any], kv: KvScaleBuffers, copy: str) -> None:
    if copy.endswith("cpu"):
        here["b"]._k_scale_cpu.fill_(2.0)
    else:
        setattr(here["b"], copy, 2.0)
    assert kv.fingerprint(shadow=False) == -1
    assert kv.fingerprint(shadow=True) >= 0


def test_the_shadows_fingerprint_is_what_is_served_after_the_exchange(kv: KvScaleBuffers) -> None:
    kv.stage(NEW)
    shadow = kv.fingerprint(shadow=True)
    kv.swap()
    assert kv.fingerprint(shadow=False) == shadow


def test_ratios_keep_what_cached_codes_mean(kv: KvScaleBuffers) -> None:
    """Of K and V alone: queries are not cached."""
    assert kv.ratios() == {}
    kv.stage({"a": {"q": [4.0], "k": [0.5], "v": [1.0]}, "b": {"q": [4.0], "k": [1.0], "v": [1.0]}})
    kv.swap()
    assert kv.ratios() == {"a": {"k": [2.0], "v": [1.0]}}
    kv.swap()
    assert kv.ratios() == {"a": {"k": [0.5], "v": [1.0]}}


@given(st.sampled_from((1, 2, 4, 8, 16, 32)), st.sampled_from((1, 2, 4, 8)))
def test_heads_are_shared_out_or_replicated(world_size: int, total: int) -> None:
    shares = [HeadShare.of(rank, world_size, total) for rank in range(world_size)]
    assert {share.count for share in shares} == {max(1, total // world_size)}
    held = [head for share in shares for head in range(share.first, share.first + share.count)]
    assert held == sorted(held)
    assert {held.count(head) for head in range(total)} == {max(1, world_size // total)}


def test_which_heads_a_rank_has() -> None:
    assert [HeadShare.of(rank, 2, 8).first for rank in range(2)] == [0, 4]
    assert [HeadShare.of(rank, 16, 8).first for rank in range(16)] == [n // 2 for n in range(16)]


@pytest.mark.parametrize("world_size", [1, 2, 8, 16])
def test_each_rank_serves_its_heads_and_all_of_them_make_the_whole(world_size: int) -> None:
    ranks = of_ranks(world_size, 8, "a", "b")
    new = {
        name: {kind: [2.0 ** (n - 9) * (kind == "v" or 0.5) for n in range(8)] for kind in NAMES}
        for name in "ab"
    }
    for rank, (here, kv) in enumerate(ranks):
        kv.stage(new)
        kv.swap()
        share = HeadShare.of(rank, world_size, 8)
        mine = slice(share.first, share.first + share.count)
        assert here["b"]._k_scale.shape == (share.count,)
        assert here["b"]._k_scale.tolist() == new["b"]["k"][mine]
        assert here["b"]._v_scale_float == max(new["b"]["v"][mine]), (
            "kernels with one number take the largest"
        )
        served = kv.served()["a"]["k"]
        assert served[mine] == new["a"]["k"][mine]
        assert [value for value in served if value is not None] == served[mine]
        assert kv.ratios()["a"]["v"] == [1 / value for value in new["a"]["v"][mine]]
    assert largest([kv.served() for _, kv in ranks]) == new


def test_digests_are_over_little_endian_fp32() -> None:
    values = [0.5, TENTH]
    digests = scale_digests({"a": {"k": values}})
    assert digests == {"a": {"k": hashlib.sha256(struct.pack("<2f", *values)).hexdigest()}}
    assert scale_digests({"a": {"k": [0.5, 0.1 + 1e-8]}}) != digests
