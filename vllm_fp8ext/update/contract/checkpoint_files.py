# SPDX-License-Identifier: Apache-2.0
"""The files that make a checkpoint. Needs neither torch nor vLLM."""

import json
import os
from collections.abc import Iterable, Set
from pathlib import Path
from typing import BinaryIO

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.log_text import shown
from vllm_fp8ext.update.contract.regular_file import opened, path_error

INDEX = "model.safetensors.index.json"
"""Name of the list of a folder's weights, in transformers and vLLM."""
SUFFIX = ".safetensors"
INDEX_LIMIT = 64 << 20
"""Longest that is read, in bytes: room for half a million tensors."""
_NAMES_SHOWN = 8
_NAME_LENGTH = 255


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, or this one file; a link to either is resolved once. Of a folder with an index those
    that it names, as vLLM loads them: others may hold the same weights in another form.

    Raises:
        UpdateError: `not-found`: there is none, or not one that the index names. `unreadable`: the index is none.
    """
    try:
        real = Path(os.path.realpath(path))
        if not real.is_dir():
            if not real.is_file():
                message = f"{path}: expected a folder or a file of safetensors, found none of that name"
                raise UpdateError("not-found", message, status=404)
            return [real]
        index = real / INDEX
        named = None
        if index.is_file():
            with opened(index) as content:
                named = indexed_files(content, index)
        files = (file.name for file in real.glob(f"*{SUFFIX}") if file.is_file())
        return [real / name for name in chosen(files, named, real)]
    except OSError as error:
        raise path_error(path, error) from None


def chosen(files: Iterable[str], named: Set[str] | None, folder: str | Path) -> list[str]:
    """Names, in order, of those of a folder's safetensors files that make its checkpoint; `named` by its index, if it has
    one.

    Raises:
        UpdateError: `not-found`: there is none, or one that the index names is missing.
    """
    names = sorted(files)
    if named is not None:
        missing = sorted(named - set(names))
        if missing:
            rest = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
            some = ", ".join(shown(name[:_NAME_LENGTH]) for name in missing[:_NAMES_SHOWN])
            message = f"{folder}/{INDEX}: names files that are missing: {some}{rest}"
            raise UpdateError("not-found", message, status=404)
        names = [name for name in names if name in named]
    if not names:
        raise UpdateError("not-found", f"{folder}: expected *{SUFFIX} files, found none", status=404)
    return names


def indexed_files(content: BinaryIO, index: str | Path) -> set[str]:
    """Names of the files that an index has; `index` is its path.

    Raises:
        UpdateError: `unreadable`: it is none.
    """
    try:
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
