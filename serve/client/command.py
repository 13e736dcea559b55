# SPDX-License-Identifier: Apache-2.0
"""`fp8ext push | catch-up | status | abandon | rollback | verify`: a server's weights from a shell."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from vllm_fp8ext import environment
from vllm_fp8ext.environment import ADMIN_KEY, DEFAULT_URL, URL
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.serve import client, schema
from vllm_fp8ext.serve.client.flow import without_password
from vllm_fp8ext.serve.client.replica_command import run_catch_up, servers_of, servers_options, urls_option
from vllm_fp8ext.serve.client.servers import Servers
from vllm_fp8ext.signals import end_on_sigterm

_errors = Console(stderr=True)

key_option = click.option("--key", envvar=ADMIN_KEY, help=f"The admin key [{ADMIN_KEY}].")
key_file_option = click.option(
    "--key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file that holds the admin key.",
)
_url_option = click.option(
    "--url", envvar=URL, default=DEFAULT_URL, show_default=True, help="The server's root."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, as the server does.")


def key_of(key: str | None, key_file: Path | None, *urls: str) -> str | None:
    """Return the admin key; None where the passwords of all of these URLs are keys, and only the environment has another.

    Raises:
        ConfigError: there is none, or none that can be sent.
    """
    context = click.get_current_context(silent=True)
    named = context is not None and context.get_parameter_source("key") is ParameterSource.COMMANDLINE
    if urls and not key_file and not named and all(without_password(url)[1] for url in urls):
        return None
    admin_key = environment.key_in(key_file) if key_file else environment.key_of(key, f"--key or {ADMIN_KEY}")
    if not admin_key:
        where = f"{key_file} is empty" if key_file else "none of them was given"
        raise ConfigError(
            f"expected the server's admin key in --key-file FILE, --key KEY or {ADMIN_KEY}: {where}"
        )
    return admin_key


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@urls_option("The server's root. Given several times: all of them, or none.")
@key_option
@key_file_option
@click.option("--version", help="Label of these weights (the training step, say).")
@click.option("--base-epoch", type=int, help="Refuse unless this epoch is served.")
@click.option("--instance", help="Refuse unless this life of the server, which fp8ext status names, goes on.")
@click.option(
    "--partial", is_flag=True, help="What CHECKPOINT lacks keeps its served weights. Needs --base-epoch."
)
@click.option(
    "--running",
    type=click.Choice(["keep", "recompute", "wait", "abort"]),
    default="keep",
    show_default=True,
    help="What becomes of running requests.",
)
@click.option("--wait-seconds", type=float, help="With --running wait: how long to wait for them.")
@click.option(
    "--expert-layout",
    type=click.Choice(["out_in", "in_out"]),
    help="How fused experts lie, [experts, out, in] or [experts, in, out]; needed where their shape does not tell.",
)
@click.option("--no-checksum", is_flag=True, help="Send no SHA-256 of the chunks.")
@click.option(
    "--fp8", is_flag=True, help="Quantize here, on the GPU if there is one, and send half the bytes."
)
@click.option("--resume", metavar="ID", help="Go on with an update that was interrupted.")
@click.option("--json", "as_json", is_flag=True, help="Print the final state as JSON.")
@servers_options
def push(
    checkpoint: Path,
    urls: tuple[str, ...],
    servers_file: Path | None,
    servers_dns: str | None,
    key: str | None,
    key_file: Path | None,
    as_json: bool,
    no_checksum: bool,
    resume: str | None,
    instance: str | None,
    **options: Any,
) -> None:
    """Send CHECKPOINT, a folder of safetensors or one file, to servers, and serve it."""
    if options["wait_seconds"] is not None and options["running"] != "wait":
        raise click.UsageError(f"--wait-seconds goes with --running wait, found {options['running']}")
    if options["partial"] and options["base_epoch"] is None:
        raise click.UsageError(
            "--partial goes with --base-epoch, found none: fp8ext status tells what is served"
        )
    servers = _servers(servers_file, servers_dns)
    if instance is not None and (len(urls) > 1 or servers is not None):
        raise click.UsageError(
            f"--instance is of one server, found {len(urls) if servers is None else 'a place of'} URLs"
        )
    end_on_sigterm()  # the update is given up
    with _sending() as progress:
        options |= {"progress": progress, "checksum": not no_checksum, "id": resume}
        if servers is not None:
            with client.Replicas(servers, key_of(key, key_file)) as replicas:
                updates = replicas.push(checkpoint, **options)
        elif len(urls) == 1:
            with client.Client(urls[0], key_of(key, key_file, urls[0])) as server:
                if resume:
                    server.update(resume)
                updates = {urls[0]: server.push(checkpoint, instance=instance, **options)}
        else:
            with client.Replicas(urls, key_of(key, key_file, *urls)) as replicas:
                updates = replicas.push(checkpoint, **options)
    if as_json:
        as_dicts = {url: update.model_dump(mode="json") for url, update in updates.items()}
        one = servers is None and len(urls) == 1
        click.echo(json.dumps(as_dicts[urls[0]] if one else as_dicts, indent=2))
        return
    for url, update in updates.items():
        result = update.result or {}
        title = f"epoch {result.get('epoch')} is served, version {result.get('version')}"
        _phases(title, url, update.seconds)


@contextlib.contextmanager
def _sending() -> Iterator[Callable[[int, int], None]]:
    """Show how much was sent; yields what is told bytes sent and bytes in all."""
    columns = (
        TextColumn("sending"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=_errors) as bar:
        task = bar.add_task("sending", total=None, visible=False)  # a refusal may come before
        try:
            yield lambda sent, total: bar.update(task, completed=sent, total=total, visible=True)
        except KeyboardInterrupt:
            _errors.print(
                "fp8ext: interrupted; the update was given up, unless its commit had begun: fp8ext status tells"
            )
            raise


@click.command("catch-up")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path), required=False)
@urls_option("A server's root; give all of them.")
@servers_options
@key_option
@key_file_option
@click.option("--fp8", is_flag=True, help="Quantize here, and send half the bytes.")
def catch_up(
    checkpoint: Path | None,
    urls: tuple[str, ...],
    servers_file: Path | None,
    servers_dns: str | None,
    key: str | None,
    key_file: Path | None,
    fp8: bool,
) -> None:
    """Bring servers that are not current to what the others serve: CHECKPOINT, or what they loaded if that is the same."""
    servers = _servers(servers_file, servers_dns)
    admin_key = key_of(key, key_file, *([] if servers is not None else urls))
    run_catch_up(checkpoint, list(urls) if servers is None else servers, admin_key, fp8=fp8)


def _servers(servers_file: Path | None, servers_dns: str | None) -> Servers | None:
    """Return the place that names the servers, if an option does."""
    servers = servers_of(servers_file, servers_dns)
    context = click.get_current_context()
    if servers is not None and context.get_parameter_source("urls") is ParameterSource.COMMANDLINE:
        raise click.UsageError("expected --url or a place that names servers, found both")
    return servers


def _phases(title: str, url: str, seconds: Mapping[str, float]) -> None:
    table = Table(title=escape(title), caption=escape(without_password(url)[0]))
    table.add_column("phase")
    table.add_column("ms", justify="right")
    for phase, taken in seconds.items():
        table.add_row(phase, f"{taken * 1e3:.2f}")
    Console().print(table)


@click.command()
@_url_option
@key_option
@key_file_option
@_json_option
def status(url: str, key: str | None, key_file: Path | None, as_json: bool) -> None:
    """Show what a server serves, and which update is open."""
    with client.Client(url, key_of(key, key_file, url)) as server:
        served = server.weights()
        update = server.update(served.update) if served.update else None
    if as_json:
        _print_json(served)
        return
    rows = {
        "epoch, version": f"{served.epoch}, {served.version}",
        "instance": served.instance or "unknown",
        "state": f"{served.state}: {served.poisoned}" if served.poisoned else served.state,
        "a rollback serves": _named(served.previous_epoch, served.previous_version),
        "open update": _opened(update),
        "staging, scales": f"{served.staging}, {served.scale_format}",
        "KV cache": f"{served.kv_cache_dtype}, {served.kv_scales.policy if served.kv_scales else 'no scales'}",
    }
    table = Table(show_header=False, caption=escape(without_password(url)[0]))
    for row in rows.items():
        table.add_row(*map(escape, row))
    Console().print(table)


def _named(epoch: int | None, version: str | None) -> str:
    return "nothing" if version is None else f"epoch {epoch}, {version}"


def _opened(update: schema.Update | None) -> str:
    if update is None:
        return "none"
    sent = update.tensors_required - update.tensors_missing
    return f"{update.id}, {update.version}: {update.state}, {sent} of {update.tensors_required} tensors"


@click.command()
@click.argument("id", required=False)
@_url_option
@key_option
@key_file_option
def abandon(id: str | None, url: str, key: str | None, key_file: Path | None) -> None:
    """Give up the update ID, by default the open one. What is served stays."""
    with client.Client(url, key_of(key, key_file, url)) as server:
        id = id or server.weights().update
        if id is None:
            click.echo("no update is open")
            return
        update = server.abandon(id)
    click.echo(f"update {update.id}, {update.version}: {update.state}")


@click.command()
@_url_option
@key_option
@key_file_option
@_json_option
def rollback(url: str, key: str | None, key_file: Path | None, as_json: bool) -> None:
    """Serve the weights from before the last commit again."""
    with client.Client(url, key_of(key, key_file, url)) as server:
        done = server.rollback()
    if as_json:
        _print_json(done)
        return
    click.echo(f"epoch {done.epoch} is served, version {done.version}")


@click.command()
@_url_option
@key_option
@key_file_option
@_json_option
def verify(url: str, key: str | None, key_file: Path | None, as_json: bool) -> None:
    """Does every rank still serve what was committed? Exit code 1 if not."""
    with client.Client(url, key_of(key, key_file, url)) as server:
        done = server.verify()
    if as_json:
        _print_json(done)
        return
    click.echo(f"every rank serves epoch {done.epoch}, version {done.version}, as it was committed")


def _print_json(model: BaseModel) -> None:
    click.echo(model.model_dump_json(indent=2))
