# SPDX-License-Identifier: Apache-2.0
"""Tensors that are staged by batched launches, against those that are staged one by one."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from update.staging import stage
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import NonFiniteError
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.transports.gather import Gather, read_items
from vllm_fp8ext.update.transports.http.message import UploadSource
from vllm_fp8ext.update.transports.memory import BufferMemory, ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import ReadAhead, TensorRows
from vllm_fp8ext.update.transports.receiver import Receivers
from vllm_fp8ext.update.transports.transport import Source
from vllm_fp8ext.update.worker import staging_plan
from vllm_fp8ext.update.worker.intake import Intake
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.rate_limiter import RateLimiter
from vllm_fp8ext.update.worker.stager import Stager
from vllm_fp8ext.update.worker.verdicts import Verdict, VerdictTable

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.quantize import quantize_weights_batched

BF16 = torch.bfloat16
SHAPES = {"qkv": (384, 128), "down": (256, 128), "odd": (200, 128)}
PLAIN = {"norm": (64,), "embed": (512, 32), "scalar": ()}


def piece(
    target: str, source: tuple[tuple[int, int], ...], origin: tuple[int, ...], quantized: bool
) -> ShardSlice:
    return ShardSlice(
        0, target, SHAPES.get(target, PLAIN.get(target, ())), source, origin, quantized, "bfloat16"
    )


PIECES = {
    "q": (piece("qkv", ((0, 256), (0, 128)), (0, 0), True),),
    "k": (piece("qkv", ((0, 128), (0, 128)), (256, 0), True),),
    "down": (piece("down", ((0, 256), (128, 256)), (0, 0), True),),  # this rank's columns
    "left": (piece("odd", ((0, 100), (0, 128)), (0, 0), True),),  # no whole blocks
    "right": (piece("odd", ((0, 100), (0, 128)), (100, 0), True),),
    "norm": (piece("norm", ((0, 64),), (0,), False),),
    "embed": (piece("embed", ((512, 1024), (0, 32)), (0, 0), False),),  # this rank's rows
    "scalar": (piece("scalar", (), (), False),),
}
SENT = {
    "q": (256, 128),
    "k": (128, 128),
    "down": (256, 256),
    "left": (100, 128),
    "right": (100, 128),
    "norm": (64,),
    "embed": (1024, 32),
    "scalar": (),
}


def stager() -> Stager:
    quantized = {}
    for name, shape in SHAPES.items():
        codes, scales = quantize_weight.empty_like(torch.empty(shape))
        codes.view(torch.uint8).fill_(0x7F)
        quantized[name] = QuantizedTarget(codes, scales.fill_(float("nan")), BF16, "fp32")
    return Stager(PIECES, quantized, {name: torch.zeros(shape, dtype=BF16) for name, shape in PLAIN.items()})


def tensors(*names: str, seed: int = 1, **dtypes: torch.dtype) -> dict[str, Tensor]:
    """All of them, or these: a block takes the interpreter a second."""
    noise = torch.Generator().manual_seed(seed)
    every = {
        name: torch.randn(shape, generator=noise).to(dtypes.get(name, BF16)) for name, shape in SENT.items()
    }
    return {name: every[name] for name in names or every}


def bucket(sent: dict[str, Tensor], gap: int = 16) -> ResidentTensors:
    """One behind the other, each at a multiple of `gap` bytes that is none of twice as much."""
    stored, size = [], 0
    for name, tensor in sent.items():
        size = -(-size // (2 * gap)) * 2 * gap + gap
        spec = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        stored.append(StoredTensor(spec, size, tensor.nbytes))
        size += tensor.nbytes
    room = torch.zeros(size + 64, dtype=torch.uint8)
    data = room[(-room.data_ptr()) % 64 :][:size]
    for tensor, where in zip(sent.values(), stored, strict=True):
        raw = tensor.reshape(-1).view(torch.uint8)
        data[where.start : where.start + where.size] = raw
    return ResidentTensors(stored, BufferMemory(data))


def contents(staged: Stager) -> list[Tensor]:
    quantized = [part for target in staged.quantized.values() for part in (target.codes, target.scales)]
    return [part.reshape(-1).view(torch.uint8).clone() for part in (*quantized, *staged.plain.values())]


def one_by_one(sent: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, tuple[float, float]]]:
    staged = stager()
    result = {name: stage(staged, name, tensor).only() for name, tensor in sent.items()}
    return contents(staged), result


def batch(
    staged: Stager, placed: ResidentTensors, exclude: Collection[str] = (), limiter: RateLimiter | None = None
) -> tuple[dict[str, Verdict], ResidentTensors]:
    """Stage what can be staged together; its verdicts, and the rest."""
    table = VerdictTable()
    rest = staged.stage_batch(placed, exclude, limiter or RateLimiter(0), table)
    return table.verdicts(), rest


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_everything_comes_to_where_it_comes_one_by_one() -> None:
    staged = stager()
    for seed in (1, 2):  # the same tensors elsewhere, with other values
        staged.reset()
        sent = tensors(seed=seed)
        expected, told = one_by_one(sent)
        result, rest = batch(staged, bucket(sent))
        assert [stored.spec.name for stored in rest.tensors] == ["left", "right"]
        for rows in rest:
            result[rows.stored.spec.name] = stage(staged, rows.stored.spec.name, rows.values).only()
        assert same(contents(staged), expected)
        assert result.keys() == told.keys()
        for name, pair in told.items():
            assert result[name] == pytest.approx(pair, rel=1e-3), name


def test_prepared_tensors_may_come_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    staged, sent = stager(), tensors("k", "norm", "left", "embed", "scalar")
    expected, told = one_by_one(sent)
    staged.prepare_batches([stored.spec for stored in bucket(sent).tensors], torch.device("cpu"))
    monkeypatch.setattr(staged._plans, "_made", lambda _: pytest.fail("planned once more"))
    result, rest = batch(staged, bucket(dict(reversed(sent.items()))))
    for rows in rest:
        stage(staged, rows.stored.spec.name, rows.values)
    assert same(contents(staged), expected)
    assert result.keys() == told.keys() - {"left"}
    assert all(result[name] == pytest.approx(told[name], rel=1e-3) for name in result)


def test_other_tensors_than_prepared_ones_are_planned() -> None:
    staged, names = stager(), ("k", "norm", "embed")
    staged.prepare_batches([stored.spec for stored in bucket(tensors(*names)).tensors], torch.device("cpu"))
    result, _ = batch(staged, bucket(tensors(*names, k=torch.float32)))
    assert list(result) == ["norm", "embed"]
    result, _ = batch(staged, bucket(tensors("k", "embed")))
    assert list(result) == ["k", "embed"]


def test_what_becomes_of_slices_that_come_once_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_plan, "KEPT_ITEMS", 4)
    staged = stager()
    for row in range(0, 1024, 64):
        name = f"embed[{row}:{row + 64},0:32]"
        values = torch.full((64, 32), float(row), dtype=BF16)
        batch(staged, bucket({name: values}))
        if row >= 512:
            assert torch.equal(staged.plain["embed"][row - 512 : row - 448], values)
    assert len(staged._plans._items) <= 5


class Nearby(Receivers):
    """Everything lies in one bucket, as on a rank's GPU."""

    def __init__(self, placed: ResidentTensors) -> None:
        super().__init__()
        self._placed = placed

    @contextmanager
    def open(
        self,
        source: Source,
        tensors: Sequence[StoredTensor],
        apart: Collection[str] = (),
        require_wanted: Callable[[], None] = lambda: None,
    ) -> Iterator[Iterable[ResidentTensors | TensorRows]]:
        yield self._parts(replace(self._placed, tensors=tensors), apart)

    def _parts(
        self, placed: ResidentTensors, apart: Collection[str]
    ) -> Iterable[ResidentTensors | TensorRows]:
        return [placed]


class Brought(Nearby):
    """Everything is brought there, 16 KiB at a time; "q" and "embed" are too large to go with others."""

    def _parts(
        self, placed: ResidentTensors, apart: Collection[str]
    ) -> Iterable[ResidentTensors | TensorRows]:
        cpu, data = torch.device("cpu"), bytes(placed.memory._data.numpy())

        def fill(buffer: memoryview, start: int) -> None:
            buffer[:] = data[start : start + len(buffer)]

        gather = Gather(cpu, 48 << 10)
        plan = gather.copy_schedule(placed.tensors, apart)
        return gather.copy_groups(ReadAhead(cpu, 2, 3, 16 << 10).read(read_items(plan), fill), plan)


def taken(sent: dict[str, Tensor], nearby: type[Nearby] = Nearby) -> tuple[list[Tensor], dict[str, Any]]:
    """What an intake stages of a bucket, and what it tells."""
    placed, staged = bucket(sent), stager()
    intake = Intake(SimpleNamespace(stager=staged), 0, 1, torch.device("cpu"))  # type: ignore[arg-type]  # all that it looks at
    intake._receivers = nearby(placed)
    intake.want("u")
    told = intake.stage(1, "u", UploadSource(""), list(placed.tensors), {})
    assert intake.progress == {1: len(sent)}
    return contents(staged), told


def coded(sent: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    """The same with these as codes, which come before their scales."""
    collected = {}
    for name, tensor in sent.items():
        codes, scales = reference.quantize_weight(tensor, "fp32") if name in names else (tensor, None)
        collected[name] = codes
        if scales is not None:
            collected[f"{name}_scale_inv"] = scales
    return collected


@pytest.mark.parametrize("nearby", [Nearby, Brought])
def test_codes_and_their_scales_come_beside_other_tensors(nearby: type[Nearby]) -> None:
    sent = tensors()
    expected, told = one_by_one(sent)
    for names in ((), ("q",), ("q", "k", "down")):
        actual, result = taken(coded(sent, *names), nearby)
        assert same(actual, expected)
        assert not result.problems
        assert result.errors.keys() == {name for name in told if told[name][1]} - set(names)


def test_codes_come_by_their_addresses_too() -> None:
    result, _ = batch(stager(), bucket(coded(tensors("q", "down"), "q", "down")))
    assert {"q", "q_scale_inv", "down", "down_scale_inv"} <= result.keys()
    alone = coded(tensors("q"), "q")
    del alone["q_scale_inv"]
    _, rest = batch(stager(), bucket(alone))
    assert "q" in {stored.spec.name for stored in rest.tensors}
    _, rest = batch(stager(), bucket(coded(tensors("q", "norm"), "q")), {"q"})
    assert {"q", "q_scale_inv"} <= {stored.spec.name for stored in rest.tensors}


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda codes, scales: codes.view(torch.uint8)[255, 127].fill_(0x7F), "non-finite"),
        (lambda codes, scales: scales[1].fill_(float("inf")), "non-finite"),
        (lambda codes, scales: scales[0].fill_(0.0), "wrong-scales"),
        (lambda codes, scales: scales[0].fill_(-1.0), "wrong-scales"),
    ],
    ids=["code", "infinite scale", "no scale", "negative scale"],
)
def test_codes_or_scales_that_can_not_be_served(spoil: Callable[[Tensor, Tensor], object], kind: str) -> None:
    sent = coded(tensors("q", "k", "norm"), "q", "k")
    spoil(sent["q"], sent["q_scale_inv"])
    _, result = taken(sent)
    assert [(problem["kind"], problem["tensor"]) for problem in result.problems] == [(kind, "q")]


def test_other_dtypes_odd_addresses_and_excluded_ones_are_left() -> None:
    sent = tensors(k=torch.float32, norm=torch.float16)
    result, rest = batch(stager(), bucket(sent), {"q"})
    assert list(result) == ["down", "embed", "scalar"]
    assert {stored.spec.name for stored in rest.tensors} == {"q", "k", "left", "right", "norm"}
    result, rest = batch(stager(), bucket(tensors(), gap=4))
    assert (result, len(rest.tensors)) == ({}, len(SENT))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["q", "down", "norm", "embed"])
def test_what_is_not_finite_is_told_of_its_tensor(name: str) -> None:
    sent = tensors(*{"scalar", "norm", name})
    sent[name].view(-1)[-1] = float("nan")
    result, _ = batch(stager(), bucket(sent))
    wrong = [name for name, verdict in result.items() if isinstance(verdict, NonFiniteError)]
    assert wrong == [name]


def test_what_another_rank_serves_is_nothing_to_look_at() -> None:
    staged = stager()
    sent = tensors("down", "norm")
    sent["down"][:, :128] = float("nan")
    result, _ = batch(staged, bucket(sent))
    assert not any(isinstance(verdict, NonFiniteError) for verdict in result.values())


def test_a_low_rate_changes_nothing_but_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_weights_batched, "SLICE_BLOCKS", 2)
    sent, staged, sizes = tensors("q", "k", "left", "norm"), stager(), list[int]()
    limiter = RateLimiter(1e9, lambda: sizes.append(1))
    begun = time.monotonic()
    result, rest = batch(staged, bucket(sent), (), limiter)
    spent = time.monotonic() - begun
    for rows in rest:
        stage(staged, rows.stored.spec.name, rows.values)
    assert same(contents(staged), one_by_one(sent)[0])
    assert len(result) == len(sent) - 1
    assert len(sizes) == 2 + 1  # three blocks, and the copies
    assert spent >= (3 * 128 * 128 * 2 + 64 * 2) / 1e9


def test_what_nobody_wants_any_more_is_not_gone_on_with() -> None:
    def wanted() -> None:
        raise UpdateError("wrong-state", "given up")

    with pytest.raises(UpdateError, match="given up"):
        batch(stager(), bucket(tensors("norm")), (), RateLimiter(1e12, wanted))
