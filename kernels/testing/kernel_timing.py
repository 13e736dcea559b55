# SPDX-License-Identifier: Apache-2.0
"""Times kernels in CUDA graphs, over operands that do not fit in the L2 cache."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch

ROTATING_BYTES = 256 << 20
"""Operands of one pass over the copies: several times the L2 cache (50 MB on an H200)."""
LAUNCHES = 24
"""Fewest launches of one graph, so that the graph's own start does not count."""
REPEATS = 7
SAMPLE_US = 2000.0
"""Length of one sample."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one launch: every sample, or why there is none."""

    samples: tuple[float, ...] = ()
    error: str = ""

    @property
    def us(self) -> float:
        """The median."""
        return statistics.median(self.samples) if self.samples else float("nan")


def copies(operand_bytes: int) -> int:
    """How many copies of an operand make a pass that the cache does not hold."""
    return max(2, -(-ROTATING_BYTES // operand_bytes))


def measure(
    variants: Mapping[str, Callable[[int], object]],
    passes: Mapping[str, int],
    repeats: int = REPEATS,
    least: int = LAUNCHES,
) -> dict[str, Timing]:
    """Time variants in turn. Each is called with the number of one of its `passes[name]` copies of its operands, again and
    again through all of them in one graph, at least `least` times.

    A variant that fails is recorded, and the others go on.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    errors: dict[str, str] = {}
    launches = {name: passes[name] * -(-least // passes[name]) for name in variants}
    for name, call in variants.items():
        try:
            graphs[name] = _capture(call, passes[name], launches[name])
        except Exception as error:
            errors[name] = _describe(error)
    replays = {
        name: max(1, round(SAMPLE_US / (_elapsed(graph, 2, 1) + 1e-3))) for name, graph in graphs.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            samples[name].append(_elapsed(graph, replays[name], launches[name]))
    timings = {name: Timing(samples=tuple(values)) for name, values in samples.items()}
    return timings | {name: Timing(error=error) for name, error in errors.items()}


def copy_bandwidth(size: int = 512 << 20) -> float:
    """Bytes per second of a copy inside the GPU, read and written bytes counted: the best of the runtime's copy and of two
    elementwise kernels, over buffers of `size` bytes."""
    source = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    part = (
        size // 4 // 8
    )  # the runtime's copy of much memory at once takes the copy engines, which are slower
    variants: dict[str, Callable[[int], object]] = {
        "copy": lambda i: target[i % 8 * part :][:part].copy_(source[i % 8 * part :][:part]),
        "not": lambda i: torch.bitwise_not(
            source[i % 2 * 4 * part :][: 4 * part], out=target[i % 2 * 4 * part :][: 4 * part]
        ),
        "not_wide": lambda i: torch.bitwise_not(source.view(torch.int64), out=target.view(torch.int64)),
    }
    timings = measure(variants, {"copy": 8, "not": 2, "not_wide": 1})
    moved = {"copy": size // 8, "not": size // 2, "not_wide": size}
    rates = [2e6 * moved[name] / timing.us for name, timing in timings.items() if timing.samples]
    return max(rates)


def matmul_rate(seconds: float, size: int = 8192) -> float:
    """Operations per second of BF16 products of random `[size, size]` matrices by cuBLAS: of the last ten after `seconds` of
    them without a break. A GPU at its power limit lowers its clock within tenths of a second."""
    noise = torch.Generator("cuda").manual_seed(0)
    left, right = (torch.randn(size, size, generator=noise, device="cuda").bfloat16() for _ in range(2))
    ten = _capture(lambda _: left @ right, 1, 10)
    time.sleep(1.0)  # at rest, whatever ran before
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        ten.replay()
        torch.cuda.synchronize()
    return 2e6 * size**3 / _elapsed(ten, 1, 10)


def _capture(call: Callable[[int], object], copies: int, launches: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
        call(1 % copies)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            call(index % copies)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _elapsed(graph: torch.cuda.CUDAGraph, replays: int, launches: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / (replays * launches)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
