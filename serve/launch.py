# SPDX-License-Identifier: Apache-2.0
"""`fp8ext serve`: vLLM's own server with the routes and their key arranged."""

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from vllm_fp8ext.config import Settings
from vllm_fp8ext.environment import ADMIN_KEY, key_of

PLUGIN = "fp8ext"


GRACE_SECONDS = 5
"""How long running requests may go on when a server is told to end: a half of what `docker stop` waits."""


def command(model: str, arguments: Sequence[str]) -> list[str]:
    """The command line that serves `model`; `--quantization blockfp8` and `--shutdown-timeout` unless the arguments say
    otherwise."""
    chosen = {argument.split("=")[0].replace("_", "-") for argument in arguments if argument.startswith("-")}
    usual: list[str] = []
    if chosen.isdisjoint(("--quantization", "-q")):
        usual += ["--quantization", "blockfp8"]
    if chosen.isdisjoint(("--shutdown-timeout", "--config")):  # a file of vLLM's options may name it
        usual += ["--shutdown-timeout", str(GRACE_SECONDS)]
    return stock_command(model, [*usual, *arguments])


def stock_command(model: str, arguments: Sequence[str]) -> list[str]:
    """The command line that serves `model` as it is."""
    # -P: the working directory must not shadow packages (this project's own folder `kernels` is one that would)
    return [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", model, *arguments]


def require_valid(arguments: Sequence[str]) -> None:
    """Check this plugin's settings among vLLM's arguments. vLLM itself comes to them after half a minute.

    Raises:
        ConfigError: they are not valid.
    """
    words: list[str] = []
    for argument in arguments:
        words += argument.split("=", 1) if argument.startswith("-") else [argument]
    for option, text in pairwise(words):
        if option.replace("_", "-") != "--additional-config":
            continue
        try:
            additional_config = json.loads(text)
        except ValueError:
            continue  # vLLM says what it expects
        if isinstance(additional_config, dict):
            Settings.parse(additional_config)


def environment(base: Mapping[str, str]) -> tuple[dict[str, str], Path | None]:
    """Return `base` with the plugin allowed and a key set. Beside it, the file that holds the key if one had to be made."""
    plugins = [name for name in base.get("VLLM_PLUGINS", "").split(",") if name]
    env = {**base, "VLLM_PLUGINS": ",".join(dict.fromkeys([*plugins, PLUGIN]))}
    if key_of(env.get(ADMIN_KEY)):
        return env, None
    env[ADMIN_KEY] = secrets.token_urlsafe(32)
    return env, _key_file(env[ADMIN_KEY])


def _key_file(key: str) -> Path:
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(folder, os.W_OK):  # of a session that has ended, or of another user
        folder = Path(tempfile.gettempdir())
    descriptor, name = tempfile.mkstemp(prefix="fp8ext-", suffix=".key", dir=folder)  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(key + "\n")
    return Path(name)
