# SPDX-License-Identifier: Apache-2.0
"""Digests of checkpoints and of what is served, and the checkpoints that are refused."""

import hashlib
import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.worker.digest import (
    checkpoint_digests,
    checkpoint_index,
    default_manifest,
    digest,
)

WIDTH = 256
SHAPES = {
    "embed_tokens.weight": (20, WIDTH),
    "layers.0.self_attn.q_proj.weight": (96, WIDTH),
    "layers.0.self_attn.k_proj.weight": (48, WIDTH),
    "layers.0.self_attn.v_proj.weight": (48, WIDTH),
    "layers.0.self_attn.o_proj.weight": (WIDTH, 128),
    "layers.0.mlp.gate_proj.weight": (96, WIDTH),
    "layers.0.mlp.up_proj.weight": (96, WIDTH),
    "layers.0.mlp.down_proj.weight": (WIDTH, 128),
    "layers.0.input_layernorm.weight": (WIDTH,),
    "layers.0.self_attn.q_proj.bias": (96,),
}
QKV = tuple(f"layers.0.self_attn.{part}_proj.weight" for part in "qkv")


@pytest.fixture
def weights() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=noise).bfloat16() for name, shape in SHAPES.items()}


def save(folder: Path, weights: dict[str, Tensor], *, files: int = 2) -> Path:
    """A checkpoint whose tensors are dealt out to several files, so that fused layers span them."""
    folder.mkdir()
    for index in range(files):
        part = {name: weights[name].contiguous() for name in list(weights)[index::files]}
        save_file(part, folder / f"model-{index}.safetensors")
    return folder


def sha(*tensors: Tensor) -> str:
    parts = [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return hashlib.sha256(b"".join(parts)).hexdigest()


# --- one piece


@pytest.fixture
def served() -> tuple[Tensor, Tensor, ShardSlice]:
    """Codes and scales of a fused matrix, and a piece of it that starts and ends inside of blocks."""
    noise = torch.Generator().manual_seed(1)
    codes, scales = reference.quantize_weight(torch.randn(500, 200, generator=noise))
    return codes, scales, ShardSlice(0, "qkv", (500, 200), ((0, 190), (0, 200)), (150, 0), True, "bfloat16")


def test_a_quantized_digest_covers_codes_and_scales(served: tuple[Tensor, Tensor, ShardSlice]) -> None:
    codes, scales, piece = served
    assert digest(piece, codes, scales) == sha(codes[150:340], scales[1:3])


@pytest.mark.parametrize(("row", "column"), [(150, 0), (339, 199), (200, 127)])
def test_one_code_changes_a_digest(served: tuple[Tensor, Tensor, ShardSlice], row: int, column: int) -> None:
    codes, scales, piece = served
    before = digest(piece, codes, scales)
    codes.view(torch.uint8)[row, column] ^= 1
    assert digest(piece, codes, scales) != before


@pytest.mark.parametrize(("row", "column"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_one_scale_changes_a_digest(served: tuple[Tensor, Tensor, ShardSlice], row: int, column: int) -> None:
    codes, scales, piece = served
    before = digest(piece, codes, scales)
    scales[row, column] = torch.nextafter(scales[row, column], torch.tensor(1.0))
    assert digest(piece, codes, scales) != before


def test_what_a_piece_does_not_touch_leaves_its_digest(served: tuple[Tensor, Tensor, ShardSlice]) -> None:
    codes, scales, piece = served
    before = digest(piece, codes, scales)
    codes.view(torch.uint8)[:150].zero_()
    codes.view(torch.uint8)[340:].zero_()
    scales[0], scales[3] = 0.0, 0.0
    assert digest(piece, codes, scales) == before


def test_a_plain_digest_covers_the_values() -> None:
    piece = ShardSlice(1, "embed", (8, 6), ((0, 4), (2, 8)), (3, 0), False, "bfloat16")
    values = torch.arange(48.0).view(8, 6).bfloat16()
    before = digest(piece, values, None)
    assert before == sha(values[3:7])
    values[7, 5] = -1
    assert digest(piece, values, None) == before
    values[6, 5] = -1
    assert digest(piece, values, None) != before


def test_a_scalar_has_a_digest() -> None:
    value = torch.tensor(3.0)
    assert digest(ShardSlice(0, "scale", (), (), (), False, "float32"), value, None) == sha(value)


# --- whole checkpoints


def test_digests_of_a_checkpoint_are_those_of_its_fused_matrices(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    """q, k and v have 96, 48 and 48 rows: one matrix of 192 rows, in which two blocks of rows span several of
    them."""
    digests = checkpoint_digests(save(tmp_path / "model", weights))
    assert list(digests) == sorted(weights)
    assert all(list(ranks) == ["0"] for ranks in digests.values())
    codes, scales = reference.quantize_weight(torch.cat([weights[name] for name in QKV]))
    assert [digests[name]["0"] for name in QKV] == [
        sha(codes[:96], scales[:1]),
        sha(codes[96:144], scales),
        sha(codes[144:], scales[1:]),
    ]
    gate, up = (f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    codes, scales = reference.quantize_weight(torch.cat([weights[gate], weights[up]]))
    assert digests[gate]["0"] == sha(codes[:96], scales[:1])
    assert digests[up]["0"] == sha(codes[96:], scales)
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        name = f"layers.0.{part}.weight"
        assert digests[name]["0"] == sha(*reference.quantize_weight(weights[name]))
    for name in ("embed_tokens.weight", "layers.0.input_layernorm.weight", "layers.0.self_attn.q_proj.bias"):
        assert digests[name]["0"] == sha(weights[name])


@pytest.mark.parametrize("files", [1, 3, 10])
def test_files_and_dtypes_of_the_same_values_do_not_matter(
    tmp_path: Path, weights: dict[str, Tensor], files: int
) -> None:
    expected = checkpoint_digests(save(tmp_path / "bf16", weights))
    wide = {name: tensor.float() for name, tensor in reversed(weights.items())}
    assert checkpoint_digests(save(tmp_path / "fp32", wide, files=files)) == expected


def test_one_weight_changes_the_digests_of_its_blocks_only(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    before = checkpoint_digests(save(tmp_path / "before", weights))
    weights[QKV[2]][47, 0] = 1000.0  # a new amax, in the block of the last rows of k and all of v
    after = checkpoint_digests(save(tmp_path / "after", weights))
    assert {name for name in before if before[name] != after[name]} == {QKV[1], QKV[2]}
    weights["embed_tokens.weight"][0, 0] += 1
    last = checkpoint_digests(save(tmp_path / "last", weights))
    assert {name for name in after if after[name] != last[name]} == {"embed_tokens.weight"}


def test_progress_is_told(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint_digests(save(tmp_path / "model", weights), progress=lambda *done: seen.append(done))
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1))


def test_digests_are_of_one_checkpoint(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """A file that is replaced meanwhile is refused; a link is followed once."""
    one, other = (
        save(tmp_path / "one", weights),
        save(tmp_path / "other", {**weights, QKV[0]: weights[QKV[0]] + 1}),
    )
    latest = tmp_path / "latest"
    latest.symlink_to(one)

    def move(done: int, total: int) -> None:
        latest.unlink()
        latest.symlink_to(other)

    assert checkpoint_digests(latest, progress=move) == checkpoint_digests(one)

    def overwrite(done: int, total: int) -> None:
        for file in other.glob("*.safetensors"):
            shutil.copy(file, one)

    with pytest.raises(UpdateError, match="was changed while it was read") as refused:
        checkpoint_digests(one, progress=overwrite)
    assert refused.value.kind == "file-changed"


def test_each_rank_has_its_own_digests(tmp_path: Path) -> None:
    """A row-parallel layer in pow2: the shard's columns are cut into blocks from its own first column."""
    noise = torch.Generator().manual_seed(2)
    weight = torch.randn(130, 300, generator=noise).bfloat16()
    name = "down_proj.weight"
    pieces = tuple(
        ShardSlice(
            rank, "down", (130, 150), ((0, 130), (150 * rank, 150 * rank + 150)), (0, 0), True, "bfloat16"
        )
        for rank in range(2)
    )
    tensors = {name: TensorSpec(name, (130, 300), "bfloat16")}
    layout = Manifest(tensors, frozenset({"extra"}), {name: pieces}, "pow2", 2)
    folder = save(tmp_path / "model", {name: weight, "extra": torch.zeros(1)}, files=1)
    assert checkpoint_digests(folder, layout) == {
        name: {
            "0": sha(*reference.quantize_weight(weight[:, :150], "pow2")),
            "1": sha(*reference.quantize_weight(weight[:, 150:], "pow2")),
        }
    }


@pytest.mark.parametrize("row", [0, 100, 150], ids="qkv")
def test_a_tensor_of_several_pieces_is_covered_by_its_digest(tmp_path: Path, row: int) -> None:
    """q, k and v as one tensor (Phi-3): vLLM's loader copies it in three pieces, and a change of any must
    show."""
    weight = torch.randn(176, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    name = "qkv_proj.weight"
    bounds = ((0, 96), (96, 136), (136, 176))
    pieces = tuple(
        ShardSlice(0, "qkv", (176, 64), ((start, stop), (0, 64)), (start, 0), True, "bfloat16")
        for start, stop in bounds
    )
    layout = Manifest({name: TensorSpec(name, (176, 64), "bfloat16")}, frozenset(), {name: pieces}, "fp32", 1)
    before = checkpoint_digests(save(tmp_path / "before", {name: weight}, files=1), layout)
    assert checkpoint_digests(save(tmp_path / "again", {name: weight}, files=1), layout) == before
    weight[row, 0] = 100.0
    assert checkpoint_digests(save(tmp_path / "after", {name: weight}, files=1), layout) != before


def test_a_checkpoint_that_the_manifest_does_not_take(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    folder = save(tmp_path / "model", weights)
    layout = default_manifest(spec for spec, _ in checkpoint_index(folder).values())
    del weights[QKV[0]]
    weights["stranger"] = torch.zeros(1)
    with pytest.raises(UpdateError, match="stranger") as caught:
        checkpoint_digests(save(tmp_path / "other", weights), layout)
    assert (caught.value.kind, caught.value.status) == ("incomplete", 422)
    assert caught.value.details["missing"] == [QKV[0]]


def test_everything_that_the_manifest_does_not_take_is_told(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    folder = save(tmp_path / "model", weights)
    layout = default_manifest(spec for spec, _ in checkpoint_index(folder).values())
    weights[QKV[0]], weights["stranger"] = torch.zeros(3, 3), torch.zeros(1)
    with pytest.raises(UpdateError, match=r"2 problems: .*stranger") as caught:
        checkpoint_digests(save(tmp_path / "other", weights), layout)
    assert caught.value.kind == "invalid-tensors"
    assert sorted(problem["kind"] for problem in caught.value.details["problems"]) == [
        "unknown-tensor",
        "wrong-shape",
    ]


def test_a_checkpoint_with_nan_is_refused(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    weights[QKV[1]][3, 3] = float("nan")
    with pytest.raises(UpdateError, match="k_proj"):
        checkpoint_digests(save(tmp_path / "model", weights))


# --- the manifest of a checkpoint alone


def test_the_default_manifest_fuses_and_quantizes_projections() -> None:
    specs = [TensorSpec(name, shape, "bfloat16") for name, shape in SHAPES.items()]
    layout = default_manifest(iter(specs))
    assert list(layout.tensors.values()) == specs
    assert (layout.scale_format, layout.world_size, layout.ignored) == ("fp32", 1, frozenset())
    placed = {
        name: (piece.target, piece.target_shape, piece.origin) for name, (piece,) in layout.pieces.items()
    }
    assert [placed[name] for name in QKV] == [(QKV[0], (192, WIDTH), (row, 0)) for row in (0, 96, 144)]
    assert placed["layers.0.mlp.up_proj.weight"] == ("layers.0.mlp.gate_proj.weight", (192, WIDTH), (96, 0))
    assert placed["layers.0.mlp.down_proj.weight"] == ("layers.0.mlp.down_proj.weight", (WIDTH, 128), (0, 0))
    assert placed["layers.0.input_layernorm.weight"] == ("layers.0.input_layernorm.weight", (WIDTH,), (0,))
    assert {name for name, (piece,) in layout.pieces.items() if piece.quantized} == {
        name for name in SHAPES if name.endswith("_proj.weight")
    }


@pytest.mark.parametrize("part", ["qkv", "gate_up"])
def test_the_default_manifest_takes_projections_that_are_fused_already(part: str) -> None:
    name = f"layers.0.{part}_proj.weight"
    layout = default_manifest([TensorSpec(name, (192, 128), "bfloat16")])
    assert layout.pieces[name] == (
        ShardSlice(0, name, (192, 128), ((0, 192), (0, 128)), (0, 0), True, "bfloat16"),
    )


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "quantized"),
    [
        ("layers.0.mlp.down_proj.weight", (64, 128), "bfloat16", True),
        ("layers.0.mlp.down_proj.weight", (64, 320), "bfloat16", False),
        ("layers.0.mlp.down_proj.weight", (96, 128), "bfloat16", False),
        ("layers.0.mlp.down_proj.weight", (64, 128), "float16", True),
        ("layers.0.mlp.down_proj.weight", (96, 128), "float16", False),
        ("visual.blocks.0.mlp.down_proj.weight", (64, 128), "bfloat16", False),
        ("vision_tower.encoder.layers.0.self_attn.o_proj.weight", (64, 128), "float32", False),
    ],
)
def test_the_default_manifest_keeps_what_a_server_keeps(
    name: str, shape: tuple[int, int], dtype: str, quantized: bool
) -> None:
    [piece] = default_manifest([TensorSpec(name, shape, dtype)]).pieces[name]
    assert piece.quantized == quantized


def test_parts_of_one_matrix_are_kept_together() -> None:
    """q, k and v of 96, 40 and 40 rows are one matrix of 176."""
    specs = [TensorSpec(name, (rows, 128), "bfloat16") for name, rows in zip(QKV, (96, 40, 40), strict=True)]
    assert not any(piece.quantized for [piece] in default_manifest(specs).pieces.values())


# --- files


def refused(path: Path) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        checkpoint_index(path)
    return caught.value


@pytest.fixture
def file(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def with_header(file: Path, change) -> None:
    """Rewrite the header of a safetensors file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def another_shape(header: dict) -> None:
    header["embed_tokens.weight"]["shape"][0] += 1


def a_hole(header: dict) -> None:
    del header["embed_tokens.weight"]


@pytest.mark.parametrize("lie", [another_shape, a_hole], ids=lambda lie: lie.__name__)
def test_a_header_that_lies_is_refused(file: Path, lie) -> None:
    with_header(file, lie)
    assert (refused(file).kind, refused(file).status) == ("broken-safetensors", 422)


def test_a_dtype_that_nobody_knows_is_refused(file: Path) -> None:
    """With everything else that the manifest does not take."""

    def unheard_of(header: dict) -> None:
        header["embed_tokens.weight"]["dtype"] = "F7"

    with_header(file, unheard_of)
    with pytest.raises(UpdateError, match="wrong-dtype") as caught:
        checkpoint_digests(file)
    assert caught.value.kind == "wrong-dtype"


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_what_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert (refused(tmp_path).kind, refused(tmp_path).status) == ("broken-safetensors", 422)


@pytest.mark.parametrize("keep", [7, 100, -1])
def test_a_truncated_file_is_refused(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    error = refused(file.parent)
    assert (error.kind, error.status) == ("broken-safetensors", 422)
    assert "model.safetensors" in str(error)


@pytest.mark.parametrize("name", ["missing", "missing.safetensors", "."])
def test_a_missing_or_empty_folder_is_not_found(tmp_path: Path, name: str) -> None:
    assert (refused(tmp_path / name).kind, refused(tmp_path / name).status) == ("not-found", 404)


def test_a_name_in_two_files_is_refused(file: Path, weights: dict[str, Tensor]) -> None:
    save_file({QKV[0]: weights[QKV[0]]}, file.parent / "more.safetensors")
    error = refused(file.parent)
    assert (error.kind, error.status) == ("duplicate-tensor", 422)
    assert all(text in str(error) for text in (QKV[0], "model.safetensors", "more.safetensors"))


def test_an_unknown_dtype_in_a_file_is_a_problem_of_the_manifest(tmp_path: Path) -> None:
    save_file({"embed": torch.zeros(3, dtype=torch.int64)}, tmp_path / "model.safetensors")
    [(spec, _)] = checkpoint_index(tmp_path).values()
    layout = default_manifest([replace(spec, dtype="bfloat16")])
    assert layout.problems([spec])[0]["kind"] == "wrong-dtype"


def test_each_matrix_of_an_expert_has_blocks_of_its_own_without_a_manifest() -> None:
    names = [f"model.layers.0.mlp.experts.1.{kind}_proj.weight" for kind in ("gate", "up", "down")]
    names += [f"model.layers.0.block_sparse_moe.experts.1.{kind}.weight" for kind in ("w1", "w3", "w2")]
    shapes = [(96, 64), (96, 64), (64, 96)] * 2
    specs = [TensorSpec(name, shape, "bfloat16") for name, shape in zip(names, shapes, strict=True)]
    router = TensorSpec("model.layers.0.mlp.gate.weight", (4, 64), "bfloat16")
    result = default_manifest([*specs, router]).pieces
    for name, shape in zip(names, shapes, strict=True):
        (piece,) = result[name]
        assert (piece.target, piece.target_shape, piece.origin, piece.quantized) == (
            name,
            shape,
            (0, 0),
            True,
        )
    assert not result[router.name][0].quantized


@pytest.fixture
def experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(1)
    names = [f"layers.0.mlp.experts.{expert}" for expert in range(3)]
    made = {f"{name}.{part}_proj.weight": (72, WIDTH) for name in names for part in ("gate", "up")}
    made |= {f"{name}.down_proj.weight": (WIDTH, 72) for name in names}
    others = {name: tensor for name, tensor in weights.items() if ".mlp." not in name}
    return others | {name: torch.randn(shape, generator=noise).bfloat16() for name, shape in made.items()}


def test_experts_may_be_fused(tmp_path: Path, experts: dict[str, Tensor]) -> None:
    apart = save(tmp_path / "apart", experts)
    manifest = default_manifest(spec for spec, _ in checkpoint_index(apart).values())
    together = dict(experts)
    for name, whole in manifest.fused.items():
        together[name] = torch.cat([together.pop(part) for part in whole.parts]).view(whole.shape)
    assert len(together) == len(experts) - 9 + 2
    fused = save(tmp_path / "fused", together)
    assert checkpoint_digests(fused, manifest) == checkpoint_digests(apart, manifest)
    with pytest.raises(
        UpdateError, match=r"down_proj: what the matrices of fused experts are called"
    ) as caught:
        checkpoint_digests(fused)
    assert (caught.value.kind, caught.value.status) == ("wrong-form", 422)
    [both] = [part for part in experts if part.endswith("experts.1.down_proj.weight")]
    twice = save(tmp_path / "twice", together | {both: experts[both]})
    with pytest.raises(UpdateError, match=f"{both} comes both alone and in layers.0.mlp.experts.down_proj"):
        checkpoint_digests(twice, manifest)


# --- codes


@pytest.fixture
def values() -> dict[str, Tensor]:
    """In a layout whose blocks are those of its tensors."""
    noise = torch.Generator().manual_seed(2)
    shapes = {
        "self_attn.o_proj.weight": (192, 256),
        "mlp.down_proj.weight": (256, 256),
        "norm.weight": (256,),
    }
    shapes |= {f"self_attn.{part}_proj.weight": (128, 256) for part in "qkv"}
    return {
        f"layers.0.{name}": torch.randn(shape, generator=noise).bfloat16() for name, shape in shapes.items()
    }


def codes_of(values: dict[str, Tensor], scale_format: ScaleFormat = "fp32") -> dict[str, Tensor]:
    """The same as codes and scales, in DeepSeek's layout, and scales of the KV cache."""
    result = {"layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5)}
    for name, tensor in values.items():
        result[name] = tensor
        if tensor.dim() == 2:
            result[name], result[f"{name}_scale_inv"] = reference.quantize_weight(tensor, scale_format)
    return result


@pytest.mark.parametrize("given", [False, True], ids=("alone", "manifest"))
def test_codes_have_the_digests_of_the_values_that_they_were_made_of(
    tmp_path: Path, values: dict[str, Tensor], given: bool
) -> None:
    plain = save(tmp_path / "values", values)
    layout = default_manifest(spec for spec, _ in checkpoint_index(plain).values()) if given else None
    expected = checkpoint_digests(plain)
    assert checkpoint_digests(save(tmp_path / "codes", codes_of(values), files=3), layout) == expected


def test_codes_are_what_is_digested(tmp_path: Path, values: dict[str, Tensor]) -> None:
    codes = codes_of(values)
    before = checkpoint_digests(save(tmp_path / "before", codes))
    name = "layers.0.mlp.down_proj.weight"
    codes[f"{name}_scale_inv"][1, 1] *= 2
    after = checkpoint_digests(save(tmp_path / "after", codes))
    assert [changed for changed in before if before[changed] != after[changed]] == [name]
    assert after[name]["0"] == sha(codes[name], codes[f"{name}_scale_inv"])


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda codes, scales: scales[0].zero_(), "wrong-scales", "expected positive scales"),
        (
            lambda codes, scales: codes.view(torch.uint8)[3].fill_(0x7F),
            "non-finite",
            "expected finite values",
        ),
        (lambda codes, scales: scales.resize_(1, 1), "wrong-shape", r"expected \[2, 2\] found \[1, 1\]"),
    ],
    ids=("scales", "codes", "shape"),
)
def test_codes_that_could_not_be_served_are_refused(
    tmp_path: Path, values: dict[str, Tensor], change: Any, kind: str, said: str
) -> None:
    result = codes_of(values)
    name = "layers.0.self_attn.o_proj.weight"
    change(result[name], result[f"{name}_scale_inv"])
    with pytest.raises(UpdateError, match=said) as caught:
        checkpoint_digests(save(tmp_path / "model", result))
    assert (caught.value.kind, caught.value.status) == (kind, 422)


def test_codes_without_scales_are_refused(tmp_path: Path, values: dict[str, Tensor]) -> None:
    codes = codes_of(values)
    del codes["layers.0.self_attn.o_proj.weight_scale_inv"]
    with pytest.raises(UpdateError, match="o_proj") as caught:
        checkpoint_digests(save(tmp_path / "model", codes))
    assert caught.value.kind == "missing-scales"
