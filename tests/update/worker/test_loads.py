# SPDX-License-Identifier: Apache-2.0
"""What a rank makes of calls of `load_weights`."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.errors import Failure, ForeignLoadError, UpdateError
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec, scale_name
from vllm_fp8ext.update.contract.rank_results import LoadEvent, LoadKind, StagedTensors
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.worker.loads import Loads
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.rank import Rank
from vllm_fp8ext.update.worker.stager import Stager

SHAPES = {"w": (300, 200), "x": (300, 200), "norm": (200,)}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def rank(request: pytest.FixtureRequest) -> Rank:
    """One that serves two quantized weights and a norm."""
    device = torch.device(request.param)
    quantized = {}
    for name in ("w", "x"):
        codes, scales = quantize_weight.empty_like(torch.empty(SHAPES[name], device=device))
        quantized[name] = QuantizedTarget(codes, scales, torch.bfloat16, "fp32")
    pieces = {
        name: (ShardSlice(0, name, shape, _whole(shape), (0,) * len(shape), len(shape) == 2, "bfloat16"),)
        for name, shape in SHAPES.items()
    }
    specs = {name: TensorSpec(name, shape, "bfloat16") for name, shape in SHAPES.items()}
    shadow: Any = SimpleNamespace(
        stager=Stager(pieces, quantized, {"norm": torch.zeros(200, dtype=torch.bfloat16, device=device)}),
        manifest=Manifest(specs, frozenset({"unused"}), pieces, "fp32", 1),
        weight_swap=SimpleNamespace(pairs=[(torch.zeros(1, device=device),) * 2]),
    )
    return Rank(shadow, 0, 1, 0, lambda model, after: None)


@pytest.fixture
def loads(rank: Rank) -> Loads:
    rank.loads.permit("u", None)
    return rank.loads


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=noise).bfloat16() for name, shape in SHAPES.items()}


def _whole(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in shape)


def problems(event: LoadEvent) -> list[tuple[str, str]]:
    assert isinstance(event.staged, StagedTensors)
    return [(problem["kind"], problem["tensor"]) for problem in event.staged.problems]


def require_staged(rank: Rank, tensors: dict[str, Tensor]) -> None:
    stager = rank.shadow.stager
    for name in ("w", "x"):
        codes, scales = reference.quantize_weight(tensors[name], "fp32")
        assert torch.equal(stager.quantized[name].codes.cpu().view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(stager.quantized[name].scales.cpu(), scales)
    assert torch.equal(stager.plain["norm"].cpu(), tensors["norm"])


def test_a_callers_default_device_is_not_ours(rank: Rank, loads: Loads, tensors: dict[str, Tensor]) -> None:
    """Trainers load weights where the GPU is torch's default."""
    with torch.device("meta"):
        assert loads.load([*tensors.items()]) == set(SHAPES)
        assert torch.empty(1).is_meta
    require_staged(rank, tensors)


def test_tensors_come_in_any_calls_dtypes_and_layouts(
    rank: Rank, loads: Loads, tensors: dict[str, Tensor]
) -> None:
    assert loads.load([("norm", tensors["norm"].float()), ("unused", torch.zeros(3))]) == {"norm"}
    assert loads.load([("module.x", tensors["x"].T.contiguous().T)]) == {"x"}
    lent = tensors["w"].to(rank.shadow.stager.plain["norm"].device, copy=True)
    loads.load([("w", lent)])
    lent.zero_()
    require_staged(rank, tensors)
    events = loads.take().events
    assert [event.kind for event in events] == [LoadKind.TENSORS] * 3
    assert [name for event in events for name, *_ in event.tensors] == ["norm", "unused", "x", "w"]
    assert not any(problems(event) for event in events)
    assert loads.take().events == []
    with pytest.raises(ForeignLoadError, match="load_weights"):
        loads.load([("norm", tensors["norm"])])


def test_nothing_holds_what_was_loaded(loads: Loads) -> None:
    """Trainers close the memory that their tensors lie in: that fails while anybody has a view of it."""
    memory = bytearray(400)
    bucket = [("norm", torch.frombuffer(memory, dtype=torch.bfloat16))]
    loads.load(bucket)
    del bucket
    memory.clear()  # raises where somebody exports it


def test_a_generator_may_yield_from_one_memory(rank: Rank, loads: Loads, tensors: dict[str, Tensor]) -> None:
    def lent() -> Iterator[tuple[str, Tensor]]:
        memory = torch.empty(SHAPES["w"], dtype=torch.bfloat16)
        for name in ("w", "x"):
            yield name, memory.copy_(tensors[name])
        memory.zero_()
        yield "norm", tensors["norm"]

    assert loads.load(lent()) == {"w", "x", "norm"}
    require_staged(rank, tensors)


def test_codes_and_scales_come_in_any_order_of_one_call(
    rank: Rank, loads: Loads, tensors: dict[str, Tensor]
) -> None:
    codes, scales = reference.quantize_weight(tensors["w"], "fp32")
    loads.load(
        iter([(scale_name("w"), scales), ("norm", tensors["norm"]), ("x", tensors["x"]), ("w", codes)])
    )
    require_staged(rank, tensors)
    loads.take()
    loads.permit("v", None)
    loads.load([("w", codes)])
    assert problems(loads.take().events[0]) == [("missing-scales", "w")]


@pytest.mark.parametrize(
    ("bucket", "expected"),
    [
        ([("y", torch.zeros(2))], [("unknown-tensor", "y")]),
        ([("norm", torch.zeros(3))], [("wrong-shape", "norm")]),
        ([("norm", torch.zeros(200, dtype=torch.float64))], [("wrong-dtype", "norm")]),
        ([("norm", torch.zeros(200, device="meta"))], [("wrong-dtype", "norm")]),
        ([("norm", torch.full((200,), torch.nan))], [("non-finite", "norm")]),
        ([("norm", torch.zeros(200)), ("norm", torch.zeros(200))], [("duplicate-tensor", "norm")]),
    ],
)
def test_what_is_wrong_is_told_and_not_raised(
    loads: Loads, bucket: list[tuple[str, Tensor]], expected: list[tuple[str, str]]
) -> None:
    loads.load(bucket)
    loads.end("finalize_layerwise_reload")
    event, end = loads.take().events
    assert problems(event) == expected
    assert end.kind is LoadKind.END


def test_a_tensor_that_comes_again_begins_an_update(loads: Loads, tensors: dict[str, Tensor]) -> None:
    for _ in range(2):
        loads.load([("w", tensors["w"])])
        loads.load([("norm", tensors["norm"])])
    kinds = [event.kind for event in loads.take().events]
    assert kinds == [LoadKind.TENSORS, LoadKind.TENSORS, LoadKind.AGAIN, LoadKind.TENSORS, LoadKind.TENSORS]
    loads.permit("v", None)
    loads.load([("w", tensors["w"])])
    assert [event.kind for event in loads.take().events] == [LoadKind.TENSORS]
    loads.permit("v", None)
    loads.begin("initialize_layerwise_reload")
    loads.load([("w", tensors["w"])])
    assert [event.kind for event in loads.take().events] == [LoadKind.BEGIN, LoadKind.TENSORS]


def test_a_refusal_is_told_and_nothing_is_staged(rank: Rank, tensors: dict[str, Tensor]) -> None:
    rank.loads.permit("u", UpdateError("asleep", "wake the engine").as_dict())
    before = rank.shadow.stager.plain["norm"].clone()
    assert rank.loads.load(iter([("norm", tensors["norm"])])) == set()
    (event,) = rank.loads.take().events
    assert isinstance(event.staged, Failure)
    assert event.staged.kind == "asleep"
    assert torch.equal(rank.shadow.stager.plain["norm"], before)


def test_tensors_after_the_end_are_refused(loads: Loads, tensors: dict[str, Tensor]) -> None:
    loads.load([("norm", tensors["norm"])])
    loads.end("process_weights_after_loading")
    loads.load([("w", tensors["w"])])
    late = loads.take().events[-1]
    assert isinstance(late.staged, Failure)
    assert late.staged.kind == "wrong-state"


def test_a_call_that_nobody_asks_about_is_refused(rank: Rank) -> None:
    with pytest.raises(ForeignLoadError, match="load_weights"):
        rank.loads.load([])
