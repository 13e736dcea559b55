# SPDX-License-Identifier: Apache-2.0
"""How long updates of large models would take on many GPUs, by what was measured on one. Arithmetic: it needs no GPU.

    python benchmarks/scale_simulation.py --out benchmarks/results/scale_simulation.json

Measured on one H200, and taken from `update_h200.json`: updates of idle engines by CUDA IPC, over HTTP and from files. Nodes
have eight GPUs. GPUs hold equal shares of the weights, and nodes work at the same time. A line through IPC's updates by bytes
is what a GPU takes for its share; for HTTP and files the bytes of a node go through one server. The rate of a link is no
measurement: it is an option, and what rests on it says `assumed`.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_fp8ext.bench.provenance import provenance, write_cases

MEASURED = Path(__file__).parent / "results" / "update_h200.json"
NODE_GPUS = 8
BF16_BYTES = 2
LINK_GB_PER_S = 50.0
"""The network card of one GPU has 400 Gb/s: assumed."""
TARGETS = {"235B on 8 GPUs": (235e9, 8), "1T on 128 GPUs": (1e12, 128)}
"""Parameters and GPUs."""


@dataclass(frozen=True)
class Figures:
    """Measured of one node: `seconds = fixed + bytes * per_byte` of a GPU's share, and bytes a second of a server."""

    fixed: float
    per_byte: float
    http: float
    files: float


@dataclass(frozen=True)
class Estimate:
    """Time of one update by one way. `rests_on`: `measured` figures alone, or an `assumed` rate too. `built`: a server takes
    such updates today; none spans nodes."""

    target: str
    way: str
    seconds: float
    bytes_of_a_node: float
    rests_on: str
    built: bool = True


def line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope of the line of least squares through `(bytes, seconds)`."""
    points = list(points)
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return mean_y - slope * mean_x, slope


def figures(cases: list[dict[str, Any]]) -> Figures:
    """Return what the results say of updates of idle engines with a shadow."""

    def of(transport: str) -> list[tuple[float, float]]:
        return [
            (case["bytes"], case["total_seconds"])
            for case in cases
            if (case["transport"], case["variant"], case["load"]) == (transport, "blockfp8", 0)
            and case["staging"] == "shadow"
            and not any("kv_scales" in sample for sample in case["samples"])
        ]

    def rate(transport: str) -> float:
        largest = max(size for size, _ in of(transport))
        return median(size / seconds for size, seconds in of(transport) if size == largest)

    return Figures(*line(of("ipc")), http=rate("http"), files=rate("files"))


def estimates(measured: Figures, link: float) -> list[Estimate]:
    """Return the time of an update of each target by each way. `link`: bytes a second of a GPU's network card, assumed."""
    rows = []
    for target, (parameters, gpus) in TARGETS.items():
        whole, nodes = parameters * BF16_BYTES, max(1, gpus // NODE_GPUS)
        share, node = whole / gpus, whole / nodes
        staged = measured.fixed + share * measured.per_byte
        for way, seconds, size, rests_on, built in (
            ("IPC, trainer on the same GPUs", staged, 0.0, "measured", True),
            ("files, each node what it serves", node / measured.files + staged, node, "measured", True),
            ("HTTP, whole tensors to each node", whole / measured.http + staged, whole, "measured", True),
            ("HTTP, slices to each node", node / measured.http + staged, node, "measured", True),
            ("NCCL, broadcast to all ranks", whole / link + staged, whole * NODE_GPUS, "assumed", True),
            ("NCCL, slices from rank to rank", share / link + staged, node, "assumed", False),
        ):
            rows.append(Estimate(target, way, seconds, size, rests_on, built and nodes == 1))
    return rows


def main() -> None:
    """Print the estimates, and write them."""
    parser = argparse.ArgumentParser(description="Estimate updates of large models on many GPUs.")
    parser.add_argument("--link-gb-per-s", type=float, default=LINK_GB_PER_S, help="of a GPU's card; assumed")
    parser.add_argument("--out", type=Path, help="file of the results")
    options = parser.parse_args()
    results = json.loads(MEASURED.read_text())
    measured = figures(results["cases"])
    cases = [asdict(each) for each in estimates(measured, options.link_gb_per_s * 1e9)]
    table = Table("target", "way", "seconds", "rests on", "built")
    for case in cases:
        built = "yes" if case["built"] else "no"
        table.add_row(case["target"], case["way"], f"{case['seconds']:.2f}", case["rests_on"], built)
    Console().print(table)
    of_node = {"figures": asdict(measured), "gpus": results["provenance"]["gpus"], "file": MEASURED.name}
    write_cases(options.out, provenance(), cases, measured=of_node, link_gb_per_s=options.link_gb_per_s)


if __name__ == "__main__":
    main()
