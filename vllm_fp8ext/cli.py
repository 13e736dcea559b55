# SPDX-License-Identifier: Apache-2.0
"""The `fp8ext` command: serve, push, catch-up, status, abandon, rollback, verify, digest, plan, calibrate, demo and bench."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Literal

import click
import httpx
from rich.console import Console
from rich.progress import Progress

from vllm_fp8ext import __version__
from vllm_fp8ext.bench.command import bench
from vllm_fp8ext.calibrate.command import VLLM_OPTIONS, calibrate
from vllm_fp8ext.checkpoints import MAX_PROBLEMS
from vllm_fp8ext.environment import URL
from vllm_fp8ext.errors import Fp8ExtError, UpdateError
from vllm_fp8ext.loadtest.command import PACKAGES as LOADTEST
from vllm_fp8ext.memory_plan.command import plan
from vllm_fp8ext.serve.client.command import (
    abandon,
    catch_up,
    key_file_option,
    key_of,
    key_option,
    push,
    rollback,
    status,
    verify,
)
from vllm_fp8ext.signals import end_on_sigterm

errors = Console(stderr=True)

_EXTRA = "pip install '.[{}]' in a clone"
_SERVER = f"{_EXTRA.format('cuda')}; make setup there for a machine without a GPU"
PACKAGES = {
    **dict.fromkeys(("vllm", "torch", "transformers", "safetensors", "fastapi", "numpy"), _SERVER),
    **dict.fromkeys((*LOADTEST, "gevent"), _EXTRA.format("loadtest")),
    "triton": "it comes with [cuda]",
}
"""Packages that some commands need, and how to install them."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fp8ext")
def cli() -> None:
    """Blockwise-FP8 rollouts for vLLM, with live weight updates."""


@cli.command(context_settings=VLLM_OPTIONS, options_metavar="")
@click.argument("model")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def serve(context: click.Context, model: str, options: tuple[str, ...]) -> None:
    """Serve MODEL with vLLM in blockwise FP8, with the weight-update routes.

    OPTIONS are those of `vllm serve` (`vllm serve --help=all` lists them), such as --port 8001 --tensor-parallel-size 2.
    """
    if model.startswith("-"):
        raise click.UsageError(f"expected MODEL before the options, found {model}", context)
    if model.startswith(("/", ".")) and not Path(model).exists():
        raise click.UsageError(f"there is no {model}", context)
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(name="vllm")
    from vllm_fp8ext.serve.launch import command, environment, require_valid

    require_valid(options)
    env, key_file = environment(os.environ)
    if key_file:
        errors.print(f"fp8ext: the admin key is in {key_file}")
    arguments = command(model, options)
    os.execve(arguments[0], arguments, env)


@cli.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--manifest",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A server's manifest, saved as JSON.",
)
@click.option("--url", envvar=URL, help="Take the manifest from this server.")
@key_option
@key_file_option
@click.option(
    "--expert-layout",
    type=click.Choice(["out_in", "in_out"]),
    help="How fused experts lie, [experts, out, in] or [experts, in, out]; needed where their shape does not tell.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as the server does.")
def digest(
    checkpoint: Path,
    manifest: Path | None,
    url: str | None,
    key: str | None,
    key_file: Path | None,
    expert_layout: Literal["out_in", "in_out"] | None,
    as_json: bool,
) -> None:
    """Digests that a server has once it serves CHECKPOINT. Needs torch, not vLLM.

    Without a manifest: of a server with one rank and default settings.
    """
    from vllm_fp8ext.serve.client import Client
    from vllm_fp8ext.update.contract.manifest import Manifest
    from vllm_fp8ext.update.worker.digest import checkpoint_digests

    layout = None
    if manifest:
        layout = Manifest.from_file(manifest)
    elif url:
        with Client(url, key_of(key, key_file, url)) as client:
            layout = Manifest.from_dict(client.manifest())
    with Progress(console=errors, transient=True) as bar:
        task = bar.add_task("hashing", total=None)
        digests = checkpoint_digests(
            checkpoint,
            layout,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            expert_layout=expert_layout,
        )
    if as_json:
        click.echo(json.dumps(digests, indent=1))
        return
    for name, ranks in digests.items():
        for rank, value in ranks.items():
            click.echo(f"{value}  {name}  rank {rank}")


@cli.group(invoke_without_command=True)
@click.option(
    "--problems",
    type=click.IntRange(1, MAX_PROBLEMS),
    default=300,
    show_default=True,
    help="Held-out problems asked each time.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here."
)
@click.pass_context
def demo(context: click.Context, problems: int, json_file: Path | None) -> None:
    """Serve a tiny model that adds numbers, and update it while it answers. Everything it needs is in the package."""
    if context.invoked_subcommand is not None:
        return
    from vllm_fp8ext.demo.run import run

    end_on_sigterm()
    sys.exit(run(problems, json_file))


@demo.command()
@click.option("--variants", multiple=True, help="Of the runs; all by default. Once for each.")
@click.option("--seeds", type=int, multiple=True, default=(0,), show_default=True, help="Once for each.")
@click.option("--steps", type=click.IntRange(1), default=120, show_default=True, help="Rollouts of a run.")
@click.option(
    "--updates", type=click.IntRange(1), default=1, show_default=True, help="Optimizer steps on each rollout."
)
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), default=1e-4, show_default=True, help="Learning rate."
)
@click.option(
    "--on-grid",
    is_flag=True,
    help="Begin with weights that are FP8 codes, which short steps do not change: the harder case.",
)
@click.option(
    "--json",
    "out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep results here; runs that it has are not repeated.",
)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with the curves here."
)
def rl(
    variants: tuple[str, ...],
    seeds: tuple[int, ...],
    steps: int,
    updates: int,
    rate: float,
    on_grid: bool,
    out: Path | None,
    html: Path | None,
) -> None:
    """Train the tiny model by GRPO through a server: rollouts in BF16 and FP8, corrected and not, beside each other."""
    from vllm_fp8ext.bench.provenance import provenance
    from vllm_fp8ext.demo.rl import VARIANTS, Plan, run

    if unknown := set(variants) - VARIANTS.keys():
        raise ValueError(
            f"--variants: expected some of {', '.join(VARIANTS)}, found {', '.join(sorted(unknown))}"
        )
    end_on_sigterm()
    plan = Plan(steps=steps, updates=updates, rate=rate, on_grid=on_grid)
    sys.exit(run(variants or tuple(VARIANTS), seeds, plan, origin=provenance(), out=out, html=html))


for command in (push, catch_up, status, abandon, rollback, verify, calibrate, plan, bench):
    cli.add_command(command)


def main() -> None:
    """The console script: errors of ours, and packages that are not there, are one line, not a traceback."""
    try:
        cli(standalone_mode=True)
    except UpdateError as error:
        _end(f"{error.kind}: {error}")  # docs/problems.md lists kinds
    except (Fp8ExtError, httpx.HTTPError, httpx.InvalidURL, OSError, OverflowError, ValueError) as error:
        _end(f"{_where(error)}{error}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES:
            raise
        _end(f"this needs the package {package}: {PACKAGES[package]}")


def _where(error: Exception) -> str:
    """Who could not be reached: httpx does not say."""
    try:
        return f"{error.request.url}: " if isinstance(error, httpx.RequestError) else ""
    except RuntimeError:  # not known
        return ""


def _end(message: str) -> None:
    errors.print(f"fp8ext: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
