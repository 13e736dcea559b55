# SPDX-License-Identifier: Apache-2.0
"""`fp8ext serve | push | digest | demo`: delegates only."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from vllm_fp8ext import __version__
from vllm_fp8ext.environment import ADMIN_KEY, URL
from vllm_fp8ext.errors import Fp8ExtError

errors = Console(stderr=True)

url_option = click.option(
    "--url", envvar=URL, default="http://127.0.0.1:8000", show_default=True, help="The server's root."
)
key_option = click.option("--key", envvar=ADMIN_KEY, help=f"The admin key [{ADMIN_KEY}].")
key_file_option = click.option(
    "--key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file that holds the admin key.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fp8ext")
def cli() -> None:
    """Blockwise-FP8 rollouts for vLLM, with live weight updates."""


@cli.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("model")
@click.pass_context
def serve(context: click.Context, model: str) -> None:
    """Serve MODEL with vLLM in blockwise FP8, with the weight-update routes. All of `vllm serve`'s options are taken."""
    from vllm_fp8ext.serve.launch import command, environment

    env, key_file = environment(os.environ)
    if key_file:
        errors.print(f"fp8ext: the admin key is in {key_file}")
    arguments = command(model, context.args)
    os.execve(arguments[0], arguments, env)


@cli.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@url_option
@key_option
@key_file_option
@click.option("--version", help="Label of these weights (the training step, say).")
@click.option("--base-epoch", type=int, help="Refuse unless this epoch is served.")
@click.option(
    "--running",
    type=click.Choice(["keep", "recompute"]),
    default="keep",
    show_default=True,
    help="What becomes of running requests.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the final state as JSON.")
def push(
    checkpoint: Path,
    url: str,
    key: str | None,
    key_file: Path | None,
    version: str | None,
    base_epoch: int | None,
    running: Any,
    as_json: bool,
) -> None:
    """Send CHECKPOINT (a folder of safetensors, or one file) to a server and serve it."""
    from vllm_fp8ext.serve.client import Client

    columns = (
        TextColumn("sending"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Client(url, _key(key, key_file)) as client, Progress(*columns, console=errors) as bar:
        task = bar.add_task("sending", total=None)
        update = client.push(
            checkpoint,
            version=version,
            base_epoch=base_epoch,
            running=running,
            progress=lambda sent, total: bar.update(task, completed=sent, total=total),
        )
    if as_json:
        click.echo(update.model_dump_json(indent=2))
        return
    result = update.result or {}
    table = Table(title=f"epoch {result.get('epoch')} is served, version {result.get('version')}")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    for phase, seconds in update.seconds.items():
        table.add_row(phase, f"{seconds * 1e3:.2f}")
    Console().print(table)


@cli.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--manifest", type=click.Path(exists=True, path_type=Path), help="A server's manifest, saved as JSON."
)
@click.option("--url", envvar=URL, help="Take the manifest from this server.")
@key_option
@key_file_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as the server does.")
def digest(
    checkpoint: Path,
    manifest: Path | None,
    url: str | None,
    key: str | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Digests that a server has once it serves CHECKPOINT. Needs torch, not vLLM.

    Without a manifest: one rank, fp32 scales, every projection quantized.
    """
    from vllm_fp8ext.serve.client import Client
    from vllm_fp8ext.weights.digest import checkpoint_digests
    from vllm_fp8ext.weights.manifest import Manifest

    layout = None
    if manifest:
        layout = Manifest.from_dict(json.loads(manifest.read_text()))
    elif url:
        with Client(url, _key(key, key_file)) as client:
            layout = Manifest.from_dict(client.manifest())
    with Progress(console=errors, transient=True) as bar:
        task = bar.add_task("hashing", total=None)
        found = checkpoint_digests(
            checkpoint, layout, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for name, ranks in found.items():
        for rank, value in ranks.items():
            click.echo(f"{value}  {name}  rank {rank}")


@cli.command()
@click.option("--problems", default=300, show_default=True, help="Held-out problems asked each time.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here."
)
def demo(problems: int, json_file: Path | None) -> None:
    """Serve a tiny model that adds numbers, and update it while it answers. Everything it needs is in the package."""
    from vllm_fp8ext.demo.run import run

    sys.exit(run(problems, json_file))


def _key(key: str | None, key_file: Path | None) -> str | None:
    return key_file.read_text().strip() if key_file else key


def main() -> None:
    """The console script: errors of ours are one line, not a traceback."""
    try:
        cli(standalone_mode=True)
    except (Fp8ExtError, httpx.HTTPError, ValueError) as error:
        errors.print(f"fp8ext: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
