# SPDX-License-Identifier: Apache-2.0
"""The commands `fp8ext bench …`: kernels, engines, servers, updates and load tests."""

import importlib
import os
import sys
from functools import partial
from pathlib import Path

import click

from vllm_fp8ext.environment import ADMIN_KEY, DEFAULT_URL, URL
from vllm_fp8ext.serve.client.command import key_file_option, key_of
from vllm_fp8ext.signals import end_on_sigterm


@click.group()
def bench() -> None:
    """Measure kernels, engines and servers."""
    end_on_sigterm()


class _Load(click.Command):
    """Its help lists what it passes on, too."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from vllm_fp8ext.loadtest.options import listed

        formatter.write(f"\n{listed()}")


@bench.command(cls=_Load, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option(
    "--url", envvar=URL, default=DEFAULT_URL, show_default=True, help="An OpenAI-compatible server."
)
@click.option(
    "--profile",
    type=click.Choice(["closed", "poisson", "constant", "rollout"]),
    default="closed",
    show_default=True,
    help="How requests come.",
)
@click.option("--users", default=8, show_default=True, help="Requests at once, in a closed loop.")
@click.option("--time", "run_time", default="60s", show_default=True, help="How long.")
@click.option("--web", is_flag=True, help="Open locust's web page instead of starting at once.")
@key_file_option
@click.pass_context
def load(
    context: click.Context,
    url: str,
    profile: str,
    users: int,
    run_time: str,
    web: bool,
    key_file: Path | None,
) -> None:
    """Load a server with rollout traffic, and change its weights meanwhile. An example: --rollout-steps 5 --update-every
    step --checkpoints A B --slo 'ttft_p99<0.5' --report FOLDER. The options of the load test stand below; locust's (`locust
    --help`) are taken too."""
    from vllm_fp8ext.loadtest.command import command

    if key_file:
        os.environ[ADMIN_KEY] = key_of(None, key_file) or ""
    line = command(url, profile, users, run_time, web, context.args)
    os.execv(line[0], line)


MEASUREMENTS = {
    "kernels": (
        "vllm_fp8ext.bench.kernels",
        "Time this project's kernels on this GPU beside BF16 and others' (--help lists the options).",
    ),
    "rollout": (
        "vllm_fp8ext.bench.rollout",
        "Time whole engines on this GPU: BF16, fp8_per_block, blockfp8 (--help lists the options).",
    ),
    "http": (
        "vllm_fp8ext.bench.over_http",
        "Time whole servers over HTTP: BF16, fp8_per_block, blockfp8 (--help lists the options).",
    ),
    "update": (
        "vllm_fp8ext.bench.updates",
        "Time weight updates of a server, idle and beside running requests (--help lists the options).",
    ),
    "kv": (
        "vllm_fp8ext.bench.kv",
        "Long responses in this GPU's whole memory: what an FP8 KV cache saves of preemptions (--help lists the options).",
    ),
    "kv-accuracy": (
        "vllm_fp8ext.bench.kv_accuracy",
        "Measure the error of an FP8 KV cache's scales, by policy (--help lists the options): K and V grow or shrink "
        "meanwhile.",
    ),
}
"""Modules of `bench` by the command that runs their `main`, and the command's help."""


def _measure(module: str, arguments: tuple[str, ...]) -> None:
    """Run a module's `main`, which parses the arguments itself."""
    sys.exit(importlib.import_module(module).main(arguments))


for _name, (_module, _help) in MEASUREMENTS.items():
    bench.add_command(
        click.Command(
            _name,
            callback=partial(_measure, _module),
            params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
            context_settings={"ignore_unknown_options": True, "help_option_names": []},
            help=_help,
        )
    )


@bench.command("report")
@click.argument(
    "reports", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--out", default="report.html", show_default=True, type=click.Path(path_type=Path))
def bench_report(reports: tuple[Path, ...], out: Path) -> None:
    """Make one page of several runs, side by side, from their report.json."""
    from vllm_fp8ext.loadtest.html_report import page, report_in

    out.write_text(page([report_in(path) for path in reports]))
    click.echo(out)
