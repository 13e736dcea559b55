# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose experts are fused: traced, staged and digested, in either layout."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from update.staging import stage
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.update.contract.fused import ExpertLayout
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.worker.digest import digest
from vllm_fp8ext.update.worker.load_trace import load_trace
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.stager import Stager

EXPERTS, WIDTH, HIDDEN = 3, 160, 96
GATE_UP, DOWN, BIAS = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.bias"


class Experts(nn.Module):
    """The second of two tensor-parallel ranks, with a loader as vLLM's of fused experts: `in_out` ones are turned first."""

    def __init__(self, layout: ExpertLayout, device: str = "meta") -> None:
        super().__init__()
        self.layout = layout
        half = WIDTH // 2

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device), requires_grad=False)

        self.w13 = parameter(EXPERTS, 2 * half, HIDDEN)
        self.w2 = parameter(EXPERTS, HIDDEN, half)
        self.bias = parameter(EXPERTS)
        self.w2_bias = parameter(EXPERTS, HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        half = WIDTH // 2
        for name, loaded in weights:
            if name == BIAS:
                self.bias.data.copy_(loaded.reshape(-1))
                continue
            if name == "mlp.down_bias":  # the first rank adds it
                self.w2_bias.data.copy_(loaded.zero_())
                continue
            weight = loaded.transpose(-1, -2) if self.layout == "in_out" else loaded
            if name == DOWN:
                self.w2.data.copy_(weight[:, :, half:].contiguous())
                continue
            for top, matrix in zip((0, half), weight.chunk(2, dim=1), strict=True):
                for expert in range(EXPERTS):
                    self.w13.data[expert].narrow(0, top, half).copy_(matrix[expert].narrow(0, half, half))


def specs_of(layout: ExpertLayout) -> list[TensorSpec]:
    shapes = {GATE_UP: (2 * WIDTH, HIDDEN), DOWN: (HIDDEN, WIDTH)}
    turned = layout == "in_out"
    return [
        *(
            TensorSpec(name, (EXPERTS, *(reversed(shape) if turned else shape)), "bfloat16")
            for name, shape in shapes.items()
        ),
        TensorSpec(BIAS, (1, EXPERTS), "bfloat16"),
        TensorSpec("mlp.down_bias", (EXPERTS, HIDDEN), "bfloat16"),
    ]


def parts_of(model: Experts) -> dict[str, Tensor]:
    """Gate and up of each expert, which are served in FP8; the rest is not."""
    half = WIDTH // 2
    return {
        f"w13[{expert}].{name}": model.w13.data[expert, top : top + half]
        for expert in range(EXPERTS)
        for name, top in (("gate", 0), ("up", half))
    }


def manifest_of(layout: ExpertLayout) -> Manifest:
    model, specs = Experts(layout), specs_of(layout)
    parts = parts_of(model)
    plain = {name: tensor for name, tensor in model.named_parameters() if name != "w13"}
    pieces = load_trace(model.load_weights, parts | plain, specs, quantized=frozenset(parts), rank=1)
    return Manifest({spec.name: spec for spec in specs}, frozenset(), pieces, "fp32", 2)


def stager_of(manifest: Manifest) -> Stager:
    half = WIDTH // 2
    quantized = {
        name: QuantizedTarget(*quantize_weight.empty_like(torch.empty(half, HIDDEN)), torch.bfloat16, "fp32")
        for name in parts_of(Experts("out_in"))
    }
    plain = {name: torch.zeros_like(tensor) for name, tensor in Experts("out_in", "cpu").named_parameters()}
    stacked = {name: manifest.tensors[name].shape for name in manifest.stacked}
    return Stager(manifest.pieces, quantized, plain, stacked=stacked)


def weights_of(layout: ExpertLayout) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)
    weights = {spec.name: torch.randn(spec.shape, generator=noise).bfloat16() for spec in specs_of("out_in")}
    if layout == "in_out":
        for name in (GATE_UP, DOWN):
            weights[name] = weights[name].transpose(1, 2).contiguous()
    return weights


LAYOUTS: tuple[ExpertLayout, ...] = ("out_in", "in_out")


@pytest.mark.parametrize("sent", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_staging_is_what_the_loader_does(layout: ExpertLayout, sent: ExpertLayout) -> None:
    """Whichever layout the checkpoint has, and in whichever the experts come."""
    loaded = Experts(layout, "cpu")
    loaded.load_weights({name: tensor.clone() for name, tensor in weights_of(layout).items()}.items())
    manifest = manifest_of(layout)
    stager = stager_of(manifest)
    for name, tensor in weights_of(sent).items():
        stage(stager, name, tensor)
    for name, values in parts_of(loaded).items():
        codes, scales = reference.quantize_weight(values)
        target = stager.quantized[name]
        assert torch.equal(target.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(target.scales, scales)
    for name in ("w2", "bias", "w2_bias"):
        assert torch.equal(stager.plain[name], getattr(loaded, name))
    assert loaded.bias.abs().min() > 0
    assert not loaded.w2_bias.any()


def test_pieces_say_where_each_matrix_goes() -> None:
    manifest, half = manifest_of("in_out"), WIDTH // 2
    assert manifest.pieces[GATE_UP][EXPERTS] == ShardSlice(
        rank=1,
        target="w13[0].up",
        target_shape=(half, HIDDEN),
        source=((0, 1), (0, HIDDEN), (WIDTH + half, 2 * WIDTH)),
        origin=(0, 0),
        quantized=True,
        dtype="bfloat16",
        transposed=True,
    )
    (down,) = manifest.pieces[DOWN]
    assert (down.source, down.extents) == (
        ((0, EXPERTS), (half, WIDTH), (0, HIDDEN)),
        (EXPERTS, HIDDEN, half),
    )
    assert manifest.pieces[BIAS][0].extents == (EXPERTS,)
    assert manifest.pieces["mlp.down_bias"] == ()
    assert not manifest.takes_codes(GATE_UP)
    assert Manifest.from_dict(manifest.as_dict()).pieces == manifest.pieces


def test_digests_are_those_of_the_other_layout() -> None:
    """They cover what is served, which does not know how it came."""
    found = []
    for layout in LAYOUTS:
        manifest = manifest_of(layout)
        stager = stager_of(manifest)
        for name, tensor in weights_of(layout).items():
            stage(stager, name, tensor)
        found.append(
            sorted(
                digest(piece, stager.quantized[piece.target].codes, stager.quantized[piece.target].scales)
                for piece in manifest.pieces[GATE_UP]
            )
        )
    assert found[0] == found[1]
    assert len(found[0]) == 2 * EXPERTS


@pytest.mark.parametrize("told", [None, *LAYOUTS])
@pytest.mark.parametrize("sent", LAYOUTS)
def test_a_shape_that_tells_takes_either_layout(sent: ExpertLayout, told: ExpertLayout | None) -> None:
    manifest = manifest_of("in_out")
    problems = manifest.problems(specs_of(sent), told)
    assert [problem["kind"] for problem in problems] == ["wrong-layout"] * (0 if told in (None, sent) else 2)


@pytest.mark.parametrize("told", [None, *LAYOUTS])
def test_a_shape_that_is_the_same_both_ways_needs_its_layout(told: ExpertLayout | None) -> None:
    """And it has to be the checkpoint's."""
    spec = TensorSpec(DOWN, (EXPERTS, HIDDEN, HIDDEN), "bfloat16")
    source = tuple((0, size) for size in spec.shape)
    piece = ShardSlice(0, "w2", spec.shape, source, (0, 0, 0), False, "bfloat16", transposed=True)
    manifest = Manifest({DOWN: spec}, frozenset(), {DOWN: (piece,)}, "fp32", 1)
    problems = manifest.problems([spec], told)
    assert [problem["expected"] for problem in problems] == ([] if told == "in_out" else ["in_out"])


def test_a_part_of_a_copy_is_that_part_of_the_tensor() -> None:
    class Copies(Experts):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            half = WIDTH // 2
            for _, weight in weights:
                copied = weight.transpose(1, 2).contiguous()
                for expert in range(EXPERTS):
                    self.w2.data[expert].copy_(copied[expert, :, half:])

    specs = specs_of("in_out")[1:2]
    expected = manifest_of("in_out").pieces[DOWN]
    model = Copies("in_out")
    parameters = {"w2": model.w2}
    assert load_trace(model.load_weights, parameters, specs, quantized=frozenset(), rank=1)[DOWN] == expected
