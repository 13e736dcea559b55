# SPDX-License-Identifier: Apache-2.0
"""Time of an FP8 layer's forward and backward pass beside BF16's.

    python benchmarks/trainer_layers.py --out benchmarks/results/trainer_h200.json

BF16 is `nn.Linear` with BF16 weights. Variants take turns, and each sample is the time of some passes between two events.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.trainer.linear import BlockFp8Linear
from vllm_fp8ext.trainer.recipes import BlockScaling

RECIPES = {"block_e4m3": BlockScaling(), "block_bf16": BlockScaling(backward="bf16")}
"""Recipes by variant, beside `bf16`."""


def measure(tokens: int, n: int, k: int, *, samples: int, passes: int, device: str) -> list[dict[str, Any]]:
    """Return a case for each variant and direction: median milliseconds, and how much faster than BF16."""
    plain = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    layers: dict[str, nn.Linear] = {"bf16": plain}
    layers |= {name: BlockFp8Linear.of(plain, recipe) for name, recipe in RECIPES.items()}
    x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
    work: dict[tuple[str, str], Callable[[], object]] = {}
    for name, layer in layers.items():
        work["forward", name] = partial(_forward, layer, x)
        work["both", name] = partial(_both, layer, x, dy)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for turn in range(samples + 1):
        for key, call in work.items():
            seconds = _seconds(call, passes, device)
            if turn:  # the first turn compiles
                times[key].append(1e3 * seconds / passes)
    shape = {"tokens": tokens, "n": n, "k": k}
    return [
        {
            **shape,
            "variant": name,
            "passes": direction,
            "ms": statistics.median(each),
            "samples": each,
            "ratio_bf16": statistics.median(times[direction, "bf16"]) / statistics.median(each),
        }
        for (direction, name), each in times.items()
    ]


@torch.no_grad()
def _forward(layer: nn.Linear, x: Tensor) -> None:
    layer(x)


def _both(layer: nn.Linear, x: Tensor, dy: Tensor) -> None:
    torch.autograd.grad(layer(x), (x, layer.weight), dy)


def _seconds(call: Callable[[], object], passes: int, device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(passes):
            call()
        return time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(passes):
        call()
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3


def main() -> int:
    """Measure, print, and write the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", nargs="+", default=["4096x12288", "12288x4096"], help="of weights, NxK")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = []
    for shape in options.shapes:
        n, k = (int(size) for size in shape.split("x"))
        cases += measure(
            options.tokens, n, k, samples=options.samples, passes=options.passes, device=options.device
        )
    for case in cases:
        text = f"{case['n']}x{case['k']} {case['variant']:12} {case['passes']:8}"
        print(f"{text} {case['ms']:8.3f} ms, {case['ratio_bf16']:.2f} x BF16")
    write_cases(options.out, provenance(), cases)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
