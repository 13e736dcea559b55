# SPDX-License-Identifier: Apache-2.0
"""Tracing a small model's own loader, and staging by what was learnt."""

import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from update.staging import stage
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.worker.load_trace import load_trace
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.stager import Stager

Q, K, V, WIDTH = 192, 64, 40, 96
VOCABULARY, PADDED = 50, 64

SPECS = [
    TensorSpec("embed", (VOCABULARY, WIDTH), "bfloat16"),
    TensorSpec("q", (2 * Q, WIDTH), "bfloat16"),
    TensorSpec("k", (2 * K, WIDTH), "bfloat16"),
    TensorSpec("v", (2 * V, WIDTH), "bfloat16"),
    TensorSpec("down", (WIDTH, 400), "bfloat16"),
    TensorSpec("norm", (WIDTH,), "float32"),
    TensorSpec("rotary.inv_freq", (8,), "float32"),
    TensorSpec("scale", (), "float32"),
]


class Model(nn.Module):
    """The second of two tensor-parallel ranks of a model with a loader such as vLLM's have."""

    def __init__(self, device: str = "meta", **loaders: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device), requires_grad=False)

        self.embed = parameter(PADDED, WIDTH)
        self.qkv = parameter(Q + K + V, WIDTH)
        self.down = parameter(WIDTH, 200)
        self.norm = parameter(WIDTH)
        self.scale = parameter()
        self.other = parameter(WIDTH, WIDTH)
        self.loaders = loaders

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name.startswith("rotary"):
                continue
            if name in self.loaders:
                self.loaders[name](self.other, weight)
            elif name == "embed":
                self.embed[:VOCABULARY].copy_(weight)
                self.embed[VOCABULARY:].fill_(0)
            elif name in ("q", "k", "v"):
                size, offset = {"q": (Q, 0), "k": (K, Q), "v": (V, Q + K)}[name]
                self.qkv.data.narrow(0, offset, size).copy_(weight.narrow(0, size, size))
            elif name == "down":
                self.down.data.copy_(weight.narrow(1, 200, 200))
            else:
                dict(self.named_parameters())[name].data.copy_(weight)


def traced(model: Model, specs: list[TensorSpec], *quantized: str) -> dict[str, tuple[ShardSlice, ...]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return load_trace(model.load_weights, parameters, specs, quantized=frozenset(quantized), rank=1)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_pieces_say_where_everything_goes(device: str) -> None:
    fused = Q + K + V, WIDTH
    expected = {
        "embed": ShardSlice(
            1,
            "embed",
            (PADDED, WIDTH),
            ((0, VOCABULARY), (0, WIDTH)),
            (0, 0),
            quantized=False,
            dtype="bfloat16",
        ),
        "q": ShardSlice(1, "qkv", fused, ((Q, 2 * Q), (0, WIDTH)), (0, 0), quantized=True, dtype="bfloat16"),
        "k": ShardSlice(1, "qkv", fused, ((K, 2 * K), (0, WIDTH)), (Q, 0), quantized=True, dtype="bfloat16"),
        "v": ShardSlice(
            1, "qkv", fused, ((V, 2 * V), (0, WIDTH)), (Q + K, 0), quantized=True, dtype="bfloat16"
        ),
        "down": ShardSlice(
            1, "down", (WIDTH, 200), ((0, WIDTH), (200, 400)), (0, 0), quantized=True, dtype="bfloat16"
        ),
        "norm": ShardSlice(1, "norm", (WIDTH,), ((0, WIDTH),), (0,), quantized=False, dtype="bfloat16"),
        "scale": ShardSlice(1, "scale", (), (), (), quantized=False, dtype="bfloat16"),
    }
    result = traced(Model(device), SPECS, "qkv", "down")
    assert result == {**{name: (piece,) for name, piece in expected.items()}, "rotary.inv_freq": ()}


def test_tracing_loads_nothing() -> None:
    model = Model("cpu")
    before = {name: tensor.clone().fill_(3.0) for name, tensor in model.named_parameters()}
    for tensor in model.parameters():
        tensor.fill_(3.0)
    traced(model, [spec for spec in SPECS if spec.name != "embed"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_staging_by_pieces_is_what_the_loader_does() -> None:
    noise = torch.Generator().manual_seed(0)
    weights = {spec.name: torch.randn(spec.shape, generator=noise).to(spec.torch_dtype) for spec in SPECS}
    loaded = Model("cpu")
    loaded.load_weights(weights.items())
    pieces = traced(Model(), SPECS, "qkv")
    codes, scales = quantize_weight.empty_like(loaded.qkv)
    plain = {name: torch.zeros_like(tensor) for name, tensor in loaded.named_parameters() if name != "qkv"}
    stager = Stager(pieces, {"qkv": QuantizedTarget(codes, scales, torch.bfloat16, "fp32")}, plain)
    for name in reversed(weights):
        stage(stager, name, weights[name])
    assert all(torch.equal(tensor, loaded.get_parameter(name)) for name, tensor in plain.items())
    expected_codes, expected_scales = quantize_weight.empty_like(loaded.qkv)
    quantize_weight.quantize_weight(loaded.qkv, expected_codes, expected_scales, "fp32")
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_a_shared_parameter_belongs_to_its_first_name() -> None:
    model = Model()
    parameters = {"first": model.norm, "second": model.norm}
    pieces = load_trace(
        lambda weights: [model.norm.copy_(w) for _, w in weights],
        parameters,
        [SPECS[5]],
        quantized=frozenset(),
        rank=0,
    )
    assert [piece.target for piece in pieces["norm"]] == ["first"]


def test_a_name_may_have_several_pieces() -> None:
    """As with a checkpoint whose q, k and v are one tensor, of which a rank takes a part of each."""

    def split(other: Tensor, weight: Tensor) -> None:
        for start, size in ((0, 32), (32, 64)):
            other.narrow(0, start, size).copy_(weight.narrow(0, 2 * start + size, size))

    pieces = traced(Model(fused=split), [TensorSpec("fused", (2 * WIDTH, WIDTH), "bfloat16")], "other")[
        "fused"
    ]
    assert [(piece.source, piece.origin) for piece in pieces] == [
        (((32, 64), (0, WIDTH)), (0, 0)),
        (((128, 192), (0, WIDTH)), (32, 0)),
    ]


def test_a_conversion_to_the_dtype_of_the_parameter_is_a_copy() -> None:
    """As MiniMax-M2 loads the bias of its router."""

    def convert(other: Tensor, weight: Tensor) -> None:
        converted = weight.to(other.dtype)
        other[:32].copy_(converted[WIDTH - 32 :])

    [piece] = traced(Model(converted=convert), [TensorSpec("converted", (WIDTH, WIDTH), "float32")])[
        "converted"
    ]
    assert (piece.source, piece.origin) == (((WIDTH - 32, WIDTH), (0, WIDTH)), (0, 0))


def test_a_loader_may_clone_and_look_at_the_first_tensors() -> None:
    """As vLLM's adapters of pooling models do: what was looked at is passed on before the rest."""
    parameter = torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="meta")
    seen: list[str] = []

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        first = next((name, weight.clone()) for name, weight in weights)
        for name, weight in itertools.chain([first], weights):
            seen.append(name)
            parameter.copy_(weight)

    specs = [TensorSpec(name, (WIDTH, WIDTH), "float32") for name in ("one", "other")]
    traced = load_trace(load, {"p": parameter}, specs, quantized=frozenset(), rank=0)
    assert seen == ["one", "other"]
    assert [piece.target for parts in traced.values() for piece in parts] == ["p", "p"]


def test_an_empty_part_is_no_piece() -> None:
    """A rank whose part of a small vocabulary is empty."""
    specs = [TensorSpec("none", (0, WIDTH), "bfloat16")]
    assert traced(Model(none=lambda other, weight: other[:0].copy_(weight)), specs) == {"none": ()}


def through_a_buffer(other: Tensor, weight: Tensor) -> None:
    buffer = torch.empty_like(other)
    buffer.copy_(weight)
    other.copy_(buffer)


def refuse(other: Tensor, weight: Tensor) -> None:
    raise KeyError("layers.7.unheard_of")


BAD: dict[str, tuple[Callable[[Tensor, Tensor], object], tuple[int, ...], str]] = {
    "computed": (lambda other, weight: other.copy_(weight * 2), (WIDTH, WIDTH), "computes on it"),
    "converted twice": (
        lambda other, weight: other.copy_(weight.to(torch.float16).to(other.dtype)),
        (WIDTH, WIDTH),
        "computes on it",
    ),
    "converted to another dtype": (
        lambda other, weight: other.copy_(weight.float()),
        (WIDTH, WIDTH),
        "computes on it",
    ),
    "converted in part": (
        lambda other, weight: other[:1].copy_(weight[:1].float()),
        (WIDTH, WIDTH),
        "computes on it",
    ),
    "buffered": (through_a_buffer, (WIDTH, WIDTH), "computes on it"),
    "transposed": (lambda other, weight: other.copy_(weight.t()), (WIDTH, WIDTH), "permuted or strided"),
    "thinned": (lambda other, weight: other.copy_(weight[::2]), (2 * WIDTH, WIDTH), "permuted or strided"),
    "reshaped": (lambda other, weight: other.copy_(weight.view(WIDTH, WIDTH)), (WIDTH * WIDTH,), "reshaped"),
    "broadcast": (lambda other, weight: other.copy_(weight), (1, WIDTH), "broadcast"),
    "refused": (refuse, (1,), "layers.7.unheard_of"),
    "misfit": (lambda other, weight: other.narrow(0, 90, 20).copy_(weight), (20, WIDTH), "narrow|start"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_loader_that_does_more_than_copy_is_refused(name: str) -> None:
    loader, shape, reason = BAD[name]
    with pytest.raises(ConfigError, match=rf"(?s)can't be updated live.*{name}: .*({reason})"):
        traced(Model(**{name: loader}), [TensorSpec(name, shape, "bfloat16")])


def test_part_of_the_columns_of_a_quantized_layer_is_refused() -> None:
    """A block's scale would depend on columns that another tensor brings; in a plain parameter there is no
    scale."""
    model = Model(left=lambda other, weight: other[:, :32].copy_(weight))
    specs = [TensorSpec("left", (WIDTH, 32), "bfloat16")]
    with pytest.raises(ConfigError, match="left: a part of the columns of a quantized layer comes alone"):
        traced(model, specs, "other")
    assert traced(model, specs)["left"][0].source == ((0, WIDTH), (0, 32))


def test_all_bad_tensors_are_named_at_once() -> None:
    specs = [*SPECS, *(TensorSpec(name, shape, "bfloat16") for name, (_, shape, _) in BAD.items())]
    with pytest.raises(ConfigError) as caught:
        traced(Model(**{name: loader for name, (loader, _, _) in BAD.items()}), specs, "qkv", "down")
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip().partition(":")[0] for line in lines if line.startswith("  ")] == list(BAD)


class Experts(nn.Module):
    """Fused experts of the second of two ranks, loaded as vLLM loads them: two of four experts, padded."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(2, 2 * 128, WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(2, WIDTH, 128, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            number, kind = name.split(".")
            expert = int(number) - 2
            if expert < 0:
                continue
            if kind == "down":
                self.w2.data[expert].narrow(1, 0, 100).copy_(weight)
            else:
                top = {"gate": 0, "up": 128}[kind]
                self.w13.data[expert].narrow(0, top, 128).narrow(0, 0, 100).copy_(weight)


def test_each_matrix_of_an_expert_is_a_target_of_its_own() -> None:
    model = Experts()
    parts = {
        f"{kind}[{expert}]": view
        for expert in range(2)
        for kind, view in (
            ("gate", model.w13.data[expert, :100]),
            ("up", model.w13.data[expert, 128:228]),
            ("down", model.w2.data[expert, :, :100]),
        )
    }
    shapes = {"gate": (100, WIDTH), "up": (100, WIDTH), "down": (WIDTH, 100)}
    specs = [TensorSpec(f"{e}.{kind}", shape, "bfloat16") for e in range(4) for kind, shape in shapes.items()]
    pieces = load_trace(model.load_weights, parts, specs, quantized=frozenset(parts), rank=1)
    for expert in range(4):
        for kind, (rows, columns) in shapes.items():
            result = pieces[f"{expert}.{kind}"]
            if expert < 2:
                assert not result
                continue
            (piece,) = result
            assert (piece.target, piece.target_shape) == (f"{kind}[{expert - 2}]", (rows, columns))
            assert (piece.source, piece.origin) == (((0, rows), (0, columns)), (0, 0))


def test_a_copy_beside_every_part_is_refused() -> None:
    model = Experts()
    parts = {"gate": model.w13.data[0, :100], "up": model.w13.data[0, 128:228]}
    specs = [TensorSpec("wide", (128, WIDTH), "bfloat16")]
    with pytest.raises(ConfigError, match="wide: a view of shape"):
        load_trace(
            lambda weights: [model.w13.data[0, :128].copy_(weight) for _, weight in weights],
            parts,
            specs,
            quantized=frozenset(parts),
            rank=0,
        )
