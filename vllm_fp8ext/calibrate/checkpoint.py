# SPDX-License-Identifier: Apache-2.0
"""A checkpoint beside another one: the same weights, linked, and scales of the FP8 KV cache as vLLM loads them."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_fp8ext.kv_types import Scales
from vllm_fp8ext.serve.safetensors_file import Range, ranges_of
from vllm_fp8ext.update.contract.checkpoint_files import INDEX
from vllm_fp8ext.update.contract.file_versions import opened_version
from vllm_fp8ext.update.contract.kv_names import is_kv_scale

SCALES_FILE = "kv_scales.safetensors"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".safetensors")


def parts_of(model: Path) -> list[Range]:
    """The tensors of a checkpoint's folder.

    Raises:
        ValueError: no folder with a config.json, or as `ranges_of`.
    """
    if not (model / "config.json").is_file():
        raise ValueError(
            f"{model}: expected a folder with config.json and *.safetensors, found no config.json"
        )
    return ranges_of(model)


def scales_in(parts: Iterable[Range]) -> list[str]:
    """Names of the scales of the KV cache that a checkpoint has."""
    return sorted(part.name for part in parts if is_kv_scale(part.name))


def checkpoint_names(layers: Iterable[str], parts: Iterable[Range]) -> dict[str, str]:
    """Map vLLM's names of attention layers to those of modules in the checkpoint.

    The checkpoint's may have another prefix: `model.layers.0.self_attn.attn` is `language_model.layers.0.self_attn` there.

    Raises:
        ValueError: a layer for whose scales vLLM has no name, or of which the checkpoint has none or several.
    """
    modules = {module for part in parts for module in _parents(part.name)}
    names = {}
    for layer in layers:
        module, _, last = layer.rpartition(".")
        if last != "attn":
            raise ValueError(f"{layer}: expected an attention layer whose name ends with .attn")
        words = module.split(".")
        tails = (".".join(words[start:]) for start in range(len(words) - 2))  # `layers.0.self_attn` at least
        places: list[str] = []
        for tail in tails:
            places = sorted(name for name in modules if name == tail or name.endswith("." + tail))
            if places:
                break
        if len(places) != 1:
            raise ValueError(f"{layer}: expected one such module in the checkpoint, found {places or 'none'}")
        names[layer] = places[0]
    return names


def _parents(name: str) -> Iterable[str]:
    words = name.split(".")
    return (".".join(words[:end]) for end in range(1, len(words)))


def write_calibrated(model: Path, out: Path, parts: list[Range], scales: Scales) -> None:
    """Write the folder `out`, at once: `model` with these scales instead of those that it has. Weights are linked, other
    files copied; a file with scales among its weights is written without them.

    Raises:
        ValueError: `checkpoint_names`. UpdateError: `file-changed`: a file is not what it was when `parts` were listed.
        OSError: no room.
    """
    import torch
    from safetensors.torch import load_file, save_file

    for file, stamp in {part.file: part.stamp for part in parts}.items():
        if stamp is not None:
            with opened_version(file, stamp):
                pass  # it is there
    names = checkpoint_names(scales, parts)
    tensors = {
        f"{names[layer]}.{kind}_scale": torch.tensor(values if len(values) > 1 else values[0])
        for layer, kinds in scales.items()
        for kind, values in kinds.items()
    }
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        folder = Path(name) / "checkpoint"
        folder.mkdir()
        for file in sorted(model.iterdir()):
            if file.is_file() and file.name != INDEX and not file.name.endswith(_OTHER_WEIGHTS):
                shutil.copy2(file, folder)
        where: dict[str, str] = {}
        for file in sorted({part.file for part in parts}):
            kept = [part.name for part in parts if part.file == file and not is_kv_scale(part.name)]
            if not kept:
                continue
            if len(kept) == sum(part.file == file for part in parts):
                _link(file.resolve(), folder / file.name)
            else:
                loaded = load_file(file)
                save_file({name: loaded[name] for name in kept}, folder / file.name, {"format": "pt"})
                shutil.copymode(file, folder / file.name)  # safetensors writes for the owner alone
            where |= dict.fromkeys(kept, file.name)
        save_file(tensors, folder / SCALES_FILE, {"format": "pt"})
        shutil.copymode(parts[0].file, folder / SCALES_FILE)
        where |= dict.fromkeys(tensors, SCALES_FILE)
        (folder / INDEX).write_text(json.dumps(_index(folder, where), indent=1) + "\n")
        folder.rename(out)


def _link(file: Path, link: Path) -> None:
    """A hard link; on another file system a symbolic one."""
    try:
        os.link(file, link)
    except OSError:
        link.symlink_to(file)


def _index(folder: Path, where: Mapping[str, str]) -> dict[str, object]:
    total = sum(part.size for part in ranges_of(folder))
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
