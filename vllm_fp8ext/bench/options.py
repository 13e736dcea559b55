# SPDX-License-Identifier: Apache-2.0
"""Options that benchmarks share: how help is laid out, cases, and settings."""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_fp8ext.errors import ConfigError


class CommandLine(argparse.ArgumentParser):
    """Parser of `fp8ext bench COMMAND`: `text` is its help, and all have --out."""

    def __init__(self, command: str, text: str | None) -> None:
        super().__init__(prog=f"fp8ext bench {command}", description=text, formatter_class=_WithDefaults)
        self.add_argument("--out", type=Path, help="write the cases here, as JSON")

    def add_choice(
        self,
        option: str,
        choices: Iterable[str],
        default: str | Sequence[str],
        what: str,
        *,
        nargs: str | None = "+",
        metavar: str = "NAME",
    ) -> None:
        """An option that takes some of `choices`, or without `nargs` one of them; its help lists them after `what`."""
        self.add_argument(
            option,
            metavar=metavar,
            nargs=nargs,
            choices=choices,
            default=default,
            help=f"{what}: %(choices)s",
        )

    def add_engines(
        self, shapes: Iterable[str], variants: Iterable[str], cases: Sequence[str], turns: str
    ) -> None:
        """Add the options of engines and their cases; `turns`: how they follow each other."""
        self.add_choice("--shape", shapes, "Qwen3-8B", "of the model", nargs=None)
        self.add_choice("--variants", variants, list(variants), f"engines, {turns}")
        self.add_argument(
            "--cases",
            nargs="+",
            metavar="REQUESTSxINPUTxOUTPUT",
            default=cases,
            help="how many at once, and tokens of each",
        )
        self.add_argument(
            "--engine",
            type=json_object,
            default={},
            help="more arguments of vllm.LLM for all of them, as JSON",
        )
        self.add_argument(
            "--checkpoint", type=Path, help="serve this one, or keep the generated weights here"
        )


class _WithDefaults(argparse.RawDescriptionHelpFormatter):
    """Tells defaults as they would be typed; those that mean "not at all" are not told."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if not default or default in (argparse.SUPPRESS, math.inf):
            return action.help
        if isinstance(default, list | tuple):
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
    """Parse an option's value as a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {text!r}")
    return value
