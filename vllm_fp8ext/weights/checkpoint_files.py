# SPDX-License-Identifier: Apache-2.0
"""Which files make a checkpoint. Needs neither torch nor vLLM."""

import json
from pathlib import Path

from vllm_fp8ext.errors import UpdateError

INDEX = "model.safetensors.index.json"
"""What transformers and vLLM call the list of a folder's weights."""


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, or this one file. Of a folder with an index those that it names, as vLLM loads them:
    others may hold the same weights in another form.

    Raises:
        UpdateError: `not-found`: there is none, or not one that the index names. `unreadable`: the index is none.
    """
    if not path.is_dir():
        if not path.is_file():
            message = f"{path}: expected a folder or a file of safetensors, found none of that name"
            raise UpdateError("not-found", message, status=404)
        return [path]
    files = sorted(path.glob("*.safetensors"))
    index = path / INDEX
    if index.is_file():
        named = _named(index)
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise UpdateError(
                "not-found", f"{index}: names files that are missing: {', '.join(missing)}", status=404
            )
        files = [file for file in files if file.name in named]
    if not files:
        raise UpdateError("not-found", f"{path}: expected *.safetensors files, found none", status=404)
    return files


def _named(index: Path) -> set[str]:
    try:
        return set(map(str, json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{index}: expected an object weight_map of file names by tensor: {error!r}"
        raise UpdateError("unreadable", message, status=422) from None
