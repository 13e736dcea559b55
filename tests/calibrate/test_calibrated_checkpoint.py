# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that get scales of an FP8 KV cache."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from forked_python.processes import Popen
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

from vllm_fp8ext.calibrate.checkpoint import (
    INDEX,
    SCALES_FILE,
    checkpoint_names,
    parts_of,
    scales_in,
    write_calibrated,
)
from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.cli import cli
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import ConfigError, UpdateError

LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(3)]
SCALES = {
    layer: {"q": [0.5 * index], "k": [0.25 * index], "v": [0.1 * index]}
    for index, layer in enumerate(LAYERS, 1)
}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """What the index of a checkpoint names, from the files that it names."""
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    assert set(where.values()) == {file.name for file in folder.glob("*.safetensors")}
    return {name: load_file(folder / file)[name] for name, file in where.items()}


def with_scales(folder: Path) -> Path:
    """The late checkpoint in two files; one scale beside weights."""
    shutil.copytree(LATE, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    first = {name: tensors[name] for name in names[:5]} | {
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(9.0)
    }
    save_file(first, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, folder / "b.safetensors")
    return folder


def test_scales_stand_beside_the_weights(tmp_path: Path):
    out = tmp_path / "out"
    write_calibrated(LATE, out, parts_of(LATE), SCALES)
    result, weights = loaded(out), load_file(LATE / "model.safetensors")
    for name, tensor in weights.items():
        assert torch.equal(result.pop(name), tensor)
    assert {name: tensor.tolist() for name, tensor in result.items()} == {
        f"{layer.removesuffix('.attn')}.{kind}_scale": torch.tensor(values[0]).item()
        for layer, kinds in SCALES.items()
        for kind, values in kinds.items()
    }
    assert all(tensor.shape == () and tensor.dtype == torch.float32 for tensor in result.values())
    assert {file.name for file in LATE.iterdir()} | {INDEX, SCALES_FILE} == {
        file.name for file in out.iterdir()
    }
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_weights_are_linked_and_other_files_copied(tmp_path: Path):
    shutil.copytree(LATE, tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_text("the same weights once more")
    (tmp_path / "out").mkdir()
    write_calibrated(tmp_path / "model", tmp_path / "out", parts_of(tmp_path / "model"), SCALES)
    for name, same in (("model.safetensors", True), ("config.json", False)):
        assert (tmp_path / "out" / name).samefile(tmp_path / "model" / name) is same
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_one_scale_for_each_head(tmp_path: Path):
    heads = {layer: {kind: [1.0, 2.0] for kind in "qkv"} for layer in LAYERS}
    write_calibrated(LATE, tmp_path / "out", parts_of(LATE), heads)
    assert load_file(tmp_path / "out" / SCALES_FILE)["model.layers.1.self_attn.k_scale"].tolist() == [
        1.0,
        2.0,
    ]


@pytest.mark.parametrize("kind", "qkv")
def test_vllm_finds_them_under_these_names(tmp_path: Path, kind: str):
    write_calibrated(LATE, tmp_path / "out", parts_of(LATE), SCALES)
    names = [name for name in load_file(tmp_path / "out" / SCALES_FILE) if name.endswith(f"{kind}_scale")]
    wanted = {f"{layer}.{kind}_scale" for layer in LAYERS}
    assert {maybe_remap_kv_scale_name(name, dict.fromkeys(wanted)) for name in names} == wanted
    assert {QuantizationConfig.get_cache_scale_mapper().map_name(name) for name in names} == wanted


def test_scales_that_it_has_are_replaced(tmp_path: Path):
    model = with_scales(tmp_path / "model")
    parts = parts_of(model)
    assert scales_in(parts) == ["model.layers.0.self_attn.k_proj.k_scale"]
    write_calibrated(model, tmp_path / "out", parts, SCALES)
    result = parts_of(tmp_path / "out")
    assert len(scales_in(result)) == 9
    assert len(result) == len(parts) - 1 + 9
    assert (tmp_path / "out" / "b.safetensors").samefile(model / "b.safetensors")
    write_calibrated(tmp_path / "out", tmp_path / "again", result, SCALES)
    assert loaded(tmp_path / "again").keys() == loaded(tmp_path / "out").keys()


def test_weights_that_are_not_those_that_were_calibrated_are_refused(tmp_path: Path):
    model = with_scales(tmp_path / "model")
    parts = parts_of(model)
    save_file(load_file(model / "b.safetensors"), model / "b.safetensors")
    with pytest.raises(UpdateError, match=r"b\.safetensors was changed") as refused:
        write_calibrated(model, tmp_path / "out", parts, SCALES)
    assert refused.value.kind == "file-changed"
    assert not (tmp_path / "out").exists()


def test_files_that_the_index_leaves_out(tmp_path: Path):
    model = tmp_path / "model"
    write_calibrated(LATE, model, parts_of(LATE), SCALES)
    save_file({"double": torch.zeros(1)}, model / "consolidated.safetensors")
    assert "double" not in {part.name for part in parts_of(model)}
    (model / SCALES_FILE).unlink()
    with pytest.raises(ValueError, match=f"names files that are missing: {SCALES_FILE}"):
        parts_of(model)


def test_modules_with_another_prefix():
    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

    parts = [Part(f"{prefix}.layers.0.self_attn.k_proj.weight") for prefix in ("language_model", "vision")]
    layer = "language_model.model.layers.0.self_attn.attn"
    with pytest.raises(ValueError, match=r"found \['language_model.layers.0.self_attn', 'vision.layers"):
        checkpoint_names([layer], parts)
    assert checkpoint_names([layer], parts[:1]) == {layer: "language_model.layers.0.self_attn"}
    with pytest.raises(ValueError, match="expected one such module in the checkpoint, found none"):
        checkpoint_names(["model.layers.1.self_attn.attn"], parts)
    with pytest.raises(ValueError, match=r"whose name ends with \.attn"):
        checkpoint_names(["model.layers.0.self_attn.core"], parts)


def invoke(*arguments: object) -> None:
    CliRunner().invoke(cli, ["calibrate", *map(str, arguments)], catch_exceptions=False)


def test_refused_before_an_engine_starts(tmp_path: Path):
    with pytest.raises(ValueError, match="expected no folder or an empty one"):
        invoke(LATE, "--out", LATE)
    model = with_scales(tmp_path / "model")
    with pytest.raises(ValueError, match=r"has scales already .*k_scale and 0 more.*--force"):
        invoke(model, "--out", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"found no config\.json"):
        invoke(tmp_path / "empty", "--out", tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"calibrate: .*file"):
        invoke(LATE, "--out", tmp_path / "file" / "out")
    assert not (tmp_path / "out").exists()


def test_an_engine_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Server, "popen", Popen)
    with pytest.raises(ConfigError, match="the server ended with code"):
        invoke(LATE, "--out", tmp_path / "out", "--no-such-option")
    assert list(tmp_path.iterdir()) == []
