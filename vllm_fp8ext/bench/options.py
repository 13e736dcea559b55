# SPDX-License-Identifier: Apache-2.0
"""What the command lines of benchmarks have in common: how help is laid out, cases, and settings."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from vllm_fp8ext.errors import ConfigError


def command_parser(command: str, text: str | None) -> argparse.ArgumentParser:
    """Of `fp8ext bench COMMAND`, with `text` as its help says it and the option that all have, --out."""
    found = argparse.ArgumentParser(
        prog=f"fp8ext bench {command}", description=text, formatter_class=_WithDefaults
    )
    found.add_argument("--out", type=Path, help="write the cases here, as JSON")
    return found


class _WithDefaults(argparse.RawDescriptionHelpFormatter):
    """Tells defaults as they would be typed; those that mean "not at all" are not told."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if not default or default in (argparse.SUPPRESS, math.inf):
            return action.help
        if isinstance(default, list | tuple | dict):
            words = [str(each) for each in default]
            default = "all" if words == [str(each) for each in action.choices or ()] else " ".join(words)
        return f"{action.help} (default: {default})"


def case_of(text: str, *, least_output: int = 1) -> tuple[int, int, int]:
    """Requests, tokens of their prompts and of their responses, of `8x512x256`.

    Raises:
        ConfigError: it is something else, or too few of one.
    """
    try:
        requests, tokens, output = map(int, text.split("x"))
    except ValueError:
        raise ConfigError(
            f"--cases: expected REQUESTSxINPUTxOUTPUT such as 8x512x256, found {text!r}"
        ) from None
    if min(requests, tokens) < 1 or output < least_output:
        raise ConfigError(
            f"--cases: expected 1 request, 1 input token and {least_output} of output at least, found {text!r}"
        )
    return requests, tokens, output


def json_object(text: str) -> dict[str, Any]:
    """What an option holds as JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {text!r}")
    return found
