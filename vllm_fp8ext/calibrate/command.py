# SPDX-License-Identifier: Apache-2.0
"""`fp8ext calibrate`."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from vllm_fp8ext.config import SECTION
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kv_settings import CALIBRATION_TOKENS
from vllm_fp8ext.signals import end_on_sigterm

if TYPE_CHECKING:
    from vllm_fp8ext.kv_types import Scales
    from vllm_fp8ext.serve.schema import KvScalesServed

progress = Console(stderr=True)
_ADDITIONAL = "--additional-config"

VLLM_OPTIONS = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
"""Parser of commands that pass on what they don't know. A group's `-h` would be found within vLLM's `-cc.cudagraph_mode`."""


@click.command(context_settings=VLLM_OPTIONS)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to write.")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A prompt a line: token ids (1 2 3 or [1, 2, 3]), or text as JSON. [default: a built-in sample of token ids]",
)
@click.option(
    "--granularity",
    type=click.Choice(["layer", "head"]),
    default="layer",
    show_default=True,
    help="A scale for each.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 8),
    default=1.0,
    show_default=True,
    help="Powers of two left for values larger than those that were seen.",
)
@click.option("--scale-format", type=click.Choice(["pow2", "fp32"]), default="pow2", show_default=True)
@click.option(
    "--tokens",
    type=click.IntRange(16, 1 << 16),
    default=CALIBRATION_TOKENS,
    show_default=True,
    help="Most tokens to calibrate with.",
)
@click.option("--force", is_flag=True, help="Replace the scales that MODEL has.")
def calibrate(
    model: Path,
    arguments: Sequence[str],
    out: Path,
    prompts: Path | None,
    tokens: int,
    force: bool,
    **chosen: Any,
) -> None:
    """Write a checkpoint with scales for an FP8 KV cache, computed from prompts.

    It holds MODEL's weights, and scales as vLLM loads them.

        MODEL is a folder of safetensors; its weights are linked, not copied. All of `vllm serve`'s options are taken, such as
        --tensor-parallel-size 2. Serve the result with --kv-cache-dtype fp8 and kv_scales static.
    """
    from vllm_fp8ext.calibrate.checkpoint import parts_of, scales_in, write_calibrated
    from vllm_fp8ext.calibrate.prompts import read_prompts

    end_on_sigterm()
    out = out.resolve()  # a folder takes the place of an empty one, not of a link to it
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: expected no folder or an empty one")
    parts = parts_of(model)
    known = scales_in(parts)
    if known and not force:
        raise ValueError(
            f"{model} has scales already ({known[0]} and {len(known) - 1} more); --force replaces them in what is written"
        )
    settings = {"policy": "calibrate", "tokens": tokens, **chosen}
    if prompts:
        settings["prompts"] = read_prompts(prompts, lambda text: _tokenized(model, text), tokens)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fp8ext-calibrate-") as folder:
            computed = _served(model, settings, Path(folder), arguments)
        write_calibrated(model, out, parts, computed.scales)
    except (OSError, RuntimeError) as error:  # no room, no permission; an engine that did not start
        raise ConfigError(f"calibrate: {error}") from error
    Console().print(_table(out, computed.scales))


def _served(
    model: Path, settings: dict[str, Any], folder: Path, arguments: Sequence[str]
) -> "KvScalesServed":
    """The scales with which an engine starts on this model."""
    from vllm_fp8ext.demo.server import Server

    merged, others = with_scales(arguments, settings)
    config = folder / "vllm.yaml"  # JSON is YAML; a command line has no room for many prompts
    config.write_text(json.dumps({"additional-config": merged}))
    line = ["--config", str(config), "--kv-cache-dtype", "fp8", "--enforce-eager", *others]
    with (
        progress.status(
            f"calibrating: an engine starts on {model} and runs {settings['tokens']} tokens at most"
        ),
        Server(model, folder / "server.log", arguments=line) as server,
    ):
        server.wait(math.inf)
        with server.client() as client:
            return client.kv_scales()


def with_scales(arguments: Sequence[str], settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """vLLM's additional configuration with these settings of `kv_scales`, and the arguments without `--additional-config`:
    on the command line it would count instead of all that is said elsewhere.

    Raises:
        ConfigError: one that is not an object, or says something of `kv_scales` itself.
    """
    merged: dict[str, Any] = {SECTION: {}}
    others = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if not name.startswith(_ADDITIONAL):
            others.append(word)
            continue
        text = value if equals else next(words, "")
        try:
            given = json.loads(text) if name == _ADDITIONAL else None
        except ValueError:
            given = None
        if not isinstance(given, dict) or not isinstance(given.get(SECTION, {}), dict):
            raise ConfigError(
                f"{name}: expected {_ADDITIONAL} and a JSON object of objects, found {text!r:.200}"
            )
        merged |= given
    if "kv_scales" in merged[SECTION]:
        raise ConfigError(
            f"{_ADDITIONAL}: expected no kv_scales, which calibrate's own options choose (--granularity, --margin, "
            f"--scale-format, --tokens, --prompts), found {merged[SECTION]['kv_scales']!r:.200}"
        )
    return {**merged, SECTION: {**merged[SECTION], "kv_scales": settings}}, others


def _tokenized(model: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    return ids


def _table(out: Path, scales: "Scales") -> Table:
    table = Table(title=f"{out}: scales of {len(scales)} layers", title_justify="left")
    for name in ("layer", "k", "v", "q"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for layer, kinds in scales.items():
        table.add_row(layer, *(_shown(kinds[kind]) for kind in ("k", "v", "q")))
    return table


def _shown(values: list[float]) -> str:
    return f"{values[0]:.4g}" if len(values) == 1 else f"{min(values):.4g} … {max(values):.4g}"
