# SPDX-License-Identifier: Apache-2.0
"""Environment variables of this package, their defaults, and the processors that it may use."""

import os
import re
from pathlib import Path

from vllm_fp8ext.errors import ConfigError

ADMIN_KEY = "FP8EXT_ADMIN_KEY"
"""Secret that guards the routes under `/fp8ext/v1`. Without it they are not mounted."""

URL = "FP8EXT_URL"
"""Default server of `fp8ext push` and other clients."""

CACHE = "FP8EXT_CACHE"
"""Folder for compiled kernels; default `~/.cache/vllm-fp8ext`."""

COMMIT = "FP8EXT_COMMIT"
"""The commit that measurements are of, where the tree has no history."""

API_KEY = "OPENAI_API_KEY"
"""Key of the OpenAI-compatible routes that a load test asks."""

DEFAULT_URL = "http://127.0.0.1:8000"
"""The server where none is named: port 8000 of this machine."""


def key_of(text: str | None, source: str = ADMIN_KEY) -> str | None:
    """Return a key without the line's end that it may have from a file; None where nothing else is there.

    `source`: where it comes from, for the error.

    Raises:
        ConfigError: nobody could send it: an HTTP header holds printable ASCII.
    """
    key = (text or "").strip()
    if wrong := re.search(r"[^ -~]", key):
        raise ConfigError(
            f"{source}: expected a key of printable ASCII characters, which an HTTP header can hold, "
            f"found another one at place {wrong.start() + 1}"
        )
    return key or None


def key_in(file: Path) -> str | None:
    """Return the key in a file, as `key_of` does."""
    return key_of(file.read_text("utf-8", errors="replace"), str(file))


def cores() -> int:
    """Count the processors that this process may run on: a container or `taskset` may allow fewer than the machine has."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on a Mac
    return len(allowed(0)) if allowed else os.cpu_count() or 1
