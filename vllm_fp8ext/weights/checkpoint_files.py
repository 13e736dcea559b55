# SPDX-License-Identifier: Apache-2.0
"""Which files make a checkpoint. Needs neither torch nor vLLM."""

import json
from pathlib import Path

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.weights.regular_file import opened

INDEX = "model.safetensors.index.json"
"""What transformers and vLLM call the list of a folder's weights."""
INDEX_LIMIT = 64 << 20
"""Longest that is read, in bytes: room for half a million tensors."""


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
    files = sorted(file for file in path.glob("*.safetensors") if file.is_file())
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
        with opened(index) as content:
            text = content.read(INDEX_LIMIT + 1)
        if len(text) > INDEX_LIMIT:
            raise ValueError
        return set(map(str, json.loads(text)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # not what it holds: the index may be anything
        message = (
            f"{index}: expected an object weight_map of file names by tensor, of {INDEX_LIMIT} bytes at most "
            f"({type(error).__name__})"
        )
        raise UpdateError("unreadable", message, status=422) from None
