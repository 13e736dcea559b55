# SPDX-License-Identifier: Apache-2.0
"""Fused experts, taken as the matrices that lie in them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.canary import CanarySpec
from vllm_fp8ext.update.contract.claims import Claim, opening_problems
from vllm_fp8ext.update.contract.fused import TRANSPOSED, ExpertLayout, fused_experts, taken_apart
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, Manifest, TensorSpec
from vllm_fp8ext.update.engine.session import Running, Session
from vllm_fp8ext.update.engine.timestamp import Moment

EXPERTS, WIDTH, HIDDEN = 3, 4, 6
NAMES = {
    "model.layers.0.mlp": ("gate_proj", "up_proj", "down_proj"),
    "model.layers.1.block_sparse_moe": ("w1", "w3", "w2"),
}


def specs() -> dict[str, TensorSpec]:
    result = {"norm.weight": TensorSpec("norm.weight", (HIDDEN,), "bfloat16")}
    for layer, (gate, up, down) in NAMES.items():
        for expert in range(EXPERTS):
            for matrix in (gate, up, down):
                name = f"{layer}.experts.{expert}.{matrix}.weight"
                shape = (HIDDEN, WIDTH) if matrix == down else (WIDTH, HIDDEN)
                result[name] = TensorSpec(name, shape, "bfloat16")
    return result


MANIFEST = Manifest(specs(), frozenset(), {}, "fp32", 1)


def session(manifest: Manifest = MANIFEST, **options: object) -> Session:
    canary = CanarySpec([[1]], built_in=True)
    opened = Moment(0.0, 0.0)
    return Session("u", "v", Running.KEEP, manifest, opened, 60.0, canary, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", NAMES)
def test_the_bytes_of_each_matrix_are_found(layer: str) -> None:
    single = {name: torch.randn(spec.shape).bfloat16() for name, spec in specs().items()}
    matrices = [
        [single[f"{layer}.experts.{n}.{name}.weight"] for name in NAMES[layer]] for n in range(EXPERTS)
    ]
    sent = {
        f"{layer}.experts.gate_up_proj": torch.stack([torch.cat(of[:2]) for of in matrices]),
        f"{layer}.experts.down_proj": torch.stack([of[2] for of in matrices]),
    }
    first = 100
    for name, tensor in sent.items():
        assert MANIFEST.fused[name].shape == tuple(tensor.shape)
        raw = tensor.view(torch.uint8).flatten()
        told = [name, list(tensor.shape), "bfloat16", first, raw.numel()]
        for part, shape, dtype, start, size in taken_apart([told], MANIFEST.fused):
            assert dtype == "bfloat16"
            result = raw[start - first : start - first + size].view(torch.bfloat16).view(shape)
            assert torch.equal(result, single[part]), part
    parts = [part for name in sent for part in MANIFEST.fused[name].parts]
    assert sorted(parts) == sorted(name for name in single if name.startswith(layer))


def test_other_tensors_are_left_as_they_are() -> None:
    tensor = ["norm.weight", [HIDDEN], "bfloat16", 8, 2 * HIDDEN]
    assert taken_apart([tensor], MANIFEST.fused) == [tensor]


@pytest.mark.parametrize(
    "shapes",
    [
        {"a.experts.0.up_proj.weight": (4, 6), "a.experts.2.up_proj.weight": (4, 6)},
        {"a.experts.0.up_proj.weight": (4, 6), "a.experts.1.up_proj.weight": (8, 6)},
        {"a.experts.0.up_proj.weight": (4,)},
        {"a.experts.0.bias": (4,), "a.expert.0.up_proj.weight": (4, 6), "a.up_proj.weight": (4, 6)},
    ],
    ids=["gap", "shapes differ", "vector", "no experts"],
)
def test_what_can_not_be_fused(shapes: dict[str, tuple[int, ...]]) -> None:
    assert fused_experts(shapes) == {}


@pytest.mark.parametrize(
    ("shape", "dtype", "problem"),
    [
        ((EXPERTS, 2 * WIDTH, HIDDEN), "float32", None),
        ((EXPERTS, HIDDEN, 2 * WIDTH), "bfloat16", TRANSPOSED),
        ((EXPERTS + 1, 2 * WIDTH, HIDDEN), "bfloat16", "wrong-shape"),
        ((EXPERTS, 2 * WIDTH, HIDDEN), CODES_DTYPE, "wrong-dtype"),
    ],
)
def test_what_is_wrong_with_a_fused_tensor(shape: tuple[int, ...], dtype: str, problem: str | None) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    listed = MANIFEST.problems([TensorSpec(name, shape, dtype)])
    assert listed == opening_problems({name: Claim(shape, dtype)}, MANIFEST)
    assert [one.get("detail", one["kind"]) for one in listed] == ([problem] if problem else [])


@pytest.mark.parametrize(("layout", "taken"), [(None, False), ("in_out", False), ("out_in", True)])
@pytest.mark.parametrize(("matrices", "width"), [(("gate_proj", "up_proj"), 3), (("down_proj",), 6)])
def test_a_shape_that_is_the_same_both_ways_needs_a_layout(
    matrices: tuple[str, ...], width: int, layout: ExpertLayout | None, taken: bool
) -> None:
    """Twice the width of an expert is the hidden size, or its width: a transposed tensor has the same shape."""
    names = [f"mlp.experts.{expert}.{matrix}.weight" for expert in range(EXPERTS) for matrix in matrices]
    square = Manifest(
        {name: TensorSpec(name, (width, HIDDEN), "bfloat16") for name in names}, frozenset(), {}, "fp32", 1
    )
    [(name, whole)] = square.fused.items()
    spec = TensorSpec(name, (EXPERTS, HIDDEN, HIDDEN), "bfloat16")
    assert whole.shape == spec.shape
    problems = square.problems([spec], layout)
    assert opening_problems({name: Claim()}, square, layout) == problems
    assert [(problem["kind"], problem["found"]) for problem in problems] == (
        [] if taken else [("wrong-layout", layout or "not told")]
    )
    update = session(square, partial=True, base_epoch=0, expert_layout=layout)
    if taken:
        update.receive("0", [spec], 10)
        return
    with pytest.raises(UpdateError) as caught:
        update.receive("0", [spec], 10)
    assert (caught.value.kind, caught.value.status) == ("wrong-layout", 422)
    assert "expected out_in" in str(caught.value)
    update.receive("0", [square.tensors[name] for name in names], 10)  # one by one they lie as they always do


@pytest.mark.parametrize("layout", [None, "out_in"])
def test_a_shape_that_tells_needs_no_layout(layout: ExpertLayout | None) -> None:
    sent = [TensorSpec(name, whole.shape, "bfloat16") for name, whole in MANIFEST.fused.items()]
    assert MANIFEST.problems(sent, layout) == []
    assert {problem["kind"] for problem in MANIFEST.problems(sent, "in_out")} == {"wrong-layout"}


def test_a_fused_tensor_brings_its_matrices_once() -> None:
    fused = "model.layers.0.mlp.experts.down_proj"
    spec = TensorSpec(fused, MANIFEST.fused[fused].shape, "bfloat16")
    one = MANIFEST.fused[fused].parts[1]
    update = session(partial=True, base_epoch=0)
    with pytest.raises(UpdateError) as caught:
        update.receive("0", [spec, MANIFEST.tensors[one]], 10)
    assert caught.value.details["problems"] == [{"kind": "duplicate-tensor", "tensor": one, "chunk": "0"}]
    update.receive("0", [spec], 10)
    update.staged("0", [])
    assert update.staged_names() == set(MANIFEST.fused[fused].parts)
    with pytest.raises(UpdateError) as caught:
        update.receive("1", [MANIFEST.tensors[one]], 10)
    assert caught.value.details["problems"] == [{"kind": "duplicate-tensor", "tensor": one, "chunk": "0"}]


def test_an_announced_fused_tensor_is_required() -> None:
    fused = "model.layers.1.block_sparse_moe.experts.gate_up_proj"
    update = session(partial=True, base_epoch=0, claims={fused: Claim()})
    assert update.required() == set(MANIFEST.fused[fused].parts)


def test_transformers_holds_experts_so(tmp_path: Path) -> None:
    """What a model's `state_dict` has, against what it saves."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 8, "num_experts": 3, "vocab_size": 16, "head_dim": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).bfloat16()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    fused = fused_experts({name: tuple(tensor.shape) for name, tensor in saved.items()})
    held = model.state_dict()
    assert fused.keys() == held.keys() - saved.keys()
    for name, whole in fused.items():
        assert tuple(held[name].shape) == whole.shape
        matrices = held[name].reshape(len(whole.parts), -1, whole.shape[2])
        for part, matrix in zip(whole.parts, matrices, strict=True):
            assert torch.equal(matrix, saved[part])
