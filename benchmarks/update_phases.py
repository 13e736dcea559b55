# SPDX-License-Identifier: Apache-2.0
"""What the parts of an update cost the requests beside it: milliseconds of their tokens, each.

    python benchmarks/update_phases.py --shape Qwen3-8B --running 128 --out phases.json

Beside requests that are the same at all times, one part is repeated for some seconds, and the rate of tokens is compared with
the rates before and after, when nothing is updated; parts take turns, --rounds times, and medians are told. `open`: open and
abandon. `stage`: open, stage, abandon. `prepare`: also fingerprint and canary.
`commit`: everything. `rollback`: the exchange alone. `files`, `http`: everything, in that way. On a GPU tensors are staged by
CUDA IPC, else from files; `stage_buckets` and `commit_buckets`: there, tensors that lie in buffers of a GiB.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console

from vllm_fp8ext.bench.background import Background, generated_tokens
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.bench.servers import add_update_options, updated_server
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.client.flat import in_buffers
from vllm_fp8ext.serve.client.transports.ipc.handles import handles
from vllm_fp8ext.update.transports.wire import stored

PARTS = ("open", "stage", "stage_buckets", "prepare", "commit", "commit_buckets", "rollback", "files", "http")
REST_SECONDS = 0.5
"""Until what a part left behind is over."""
console = Console(width=140, highlight=False)


def main() -> int:
    options = _options()
    origin, cases = provenance(), []
    with (
        updated_server(options, options.running) as (server, checkpoints),
        server.client() as client,
        Background(server.url, options.running) as load,
    ):
        buckets = any(name.endswith("_buckets") for name in options.parts)
        parts = Parts(client, checkpoints, on_gpu=torch.cuda.is_available(), buckets=buckets)
        load.settle()
        usual = _rate(server.url, options.seconds, partial(time.sleep, options.seconds))[0]
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in options.parts}
        for name in options.parts * options.rounds:
            parts.commit()  # there is something to go back to, whatever came before
            time.sleep(REST_SECONDS)
            during, seconds, count = _rate(server.url, options.seconds, getattr(parts, name))
            time.sleep(REST_SECONDS)
            after = _rate(server.url, options.seconds, partial(time.sleep, options.seconds))[0]
            lost = 1 - 2 * during / (usual + after)
            samples[name].append(
                {
                    "seconds": seconds / count,
                    "count": count,
                    "tokens_per_s_before": usual,
                    "tokens_per_s_during": during,
                    "tokens_per_s_after": after,
                    "tokens_lost": lost,
                    "lost_ms": lost * seconds / count * 1e3,
                }
            )
            cases = [_case(options, part, taken) for part, taken in samples.items() if taken]
            write_cases(options.out, origin, cases)
            usual = after
    for case in cases:
        console.print(
            f"{case['part']:14} {case['seconds']:7.3f} s each, {case['tokens_lost']:6.1%} of tokens lost, "
            f"{case['lost_ms']:7.1f} ms each"
        )
    return 0


def _case(options: argparse.Namespace, part: str, samples: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each number."""
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    what = {"model": options.shape, "load": options.running, "part": part}
    return {**what, **medians, "samples": samples}


class Parts:
    """Each changes the weights back and forth, as far as it goes."""

    def __init__(self, client: Client, checkpoints: list[Path], *, on_gpu: bool, buckets: bool) -> None:
        self._client = client
        self._folders = itertools.cycle(checkpoints[::-1])
        self._tensors = {path: dict(stored(path, "cuda")) for path in checkpoints} if on_gpu else {}
        self._buckets = {
            path: dict(in_buffers(held.items())) for path, held in self._tensors.items() if buckets
        }

    def open(self) -> None:
        self._client.abandon(self._client.open().id)

    def stage(self) -> None:
        self._client.abandon(self._staged(self._tensors))

    def stage_buckets(self) -> None:
        self._client.abandon(self._staged(self._buckets))

    def prepare(self) -> None:
        update = self._staged(self._tensors)
        self._client.prepare(update)
        self._client.abandon(update)

    def commit(self) -> None:
        self._client.commit(self._staged(self._tensors))

    def commit_buckets(self) -> None:
        self._client.commit(self._staged(self._buckets))

    def rollback(self) -> None:
        self._client.rollback()

    def files(self) -> None:
        self._client.load(next(self._folders))

    def http(self) -> None:
        self._client.push(next(self._folders))

    def _staged(self, tensors: dict[Path, dict[str, Any]]) -> str:
        """The id of an update that has everything."""
        update, folder = self._client.open().id, next(self._folders)
        if tensors:
            self._client.handles(update, handles(list(tensors[folder].items()), 0))
        else:
            self._client.files(update, folder)
        return update


def _rate(url: str, seconds: float, work: Callable[[], Any]) -> tuple[float, float, int]:
    """Tokens per second while `work` is done again and again for so long; the seconds; and how often it was."""
    with httpx.Client(base_url=url) as client:
        tokens, start, count = generated_tokens(client), time.monotonic(), 0
        while not count or time.monotonic() < start + seconds:
            work()
            count += 1
        took = time.monotonic() - start
        return (generated_tokens(client) - tokens) / took, took, count


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_update_options(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=1, help="how often all parts take their turn")
    parser.add_argument("--running", type=int, default=128, help="requests beside the updates")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="of each part, and of the rest between them"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
