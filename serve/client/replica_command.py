# SPDX-License-Identifier: Apache-2.0
"""`fp8ext catch-up`, and the options by which commands name several servers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from vllm_fp8ext.environment import DEFAULT_URL, URL
from vllm_fp8ext.serve import client
from vllm_fp8ext.serve.client.servers import Servers
from vllm_fp8ext.signals import end_on_sigterm

F = TypeVar("F", bound=Callable[..., Any])


def urls_option(help: str) -> Callable[[F], F]:
    """Return what adds `--url`, which may be given several times, to a command."""
    return click.option(
        "--url", "urls", envvar=URL, multiple=True, default=[DEFAULT_URL], show_default=True, help=help
    )


def servers_options(command: F) -> F:
    """Add `--servers-file` and `--servers-dns` to a command."""
    by_file = click.option(
        "--servers-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="All servers that this file names, a URL in each line.",
    )
    by_dns = click.option(
        "--servers-dns", metavar="URL", help="All servers that the host name of this URL has addresses of."
    )
    return by_file(by_dns(command))


def servers_of(servers_file: Path | None, servers_dns: str | None) -> Servers | None:
    """Return the place that names the servers; None without one.

    Raises:
        click.UsageError: two places.
    """
    if servers_file is not None and servers_dns is not None:
        raise click.UsageError("expected --servers-file or --servers-dns, found both")
    if servers_file is not None:
        return client.ServersFile(servers_file)
    return None if servers_dns is None else client.ServersDns(servers_dns)


def run_catch_up(
    checkpoint: Path | None, servers: Servers | list[str], key: str | None, **options: Any
) -> None:
    """Bring late servers to what the others serve, and say what they serve then."""
    end_on_sigterm()
    with client.Replicas(servers, key) as replicas:
        told = replicas.catch_up(checkpoint, **options)
    for url, served in told.items():
        click.echo(f"{url}: epoch {served.epoch} is served, version {served.version}")
    if not told:
        click.echo("no server is late")
