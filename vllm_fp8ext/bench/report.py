# SPDX-License-Identifier: Apache-2.0
"""Cases of kernels, as lines in the terminal and as a result file."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.kernels.testing import kernel_timing

Calls = dict[str, Callable[[int], object]]
"""Calls by variant; each takes the number of one copy of its operands."""

NUMBERS = ("us", "gbps", "tflops", "ratio", "ratio_bf16", "ratio_copy")
"""Numbers of a case; none where it could not be timed."""
MATMULS = {"at_first": 0.0, "after_seconds": 3.0}
"""Seconds of BF16 products before those that tell what the GPU can multiply."""


class Report:
    """Collects cases; the file is written anew after each. `stop`: the time (`time.perf_counter`) after which no case is
    begun."""

    def __init__(self, file: Path | None, stop: float = math.inf) -> None:
        self.file = file
        self.stop = stop
        self.provenance = provenance()
        self.cases: list[dict[str, Any]] = []
        self.bandwidth = kernel_timing.copy_bandwidth()
        self.matmul: dict[str, float] = {}
        self._console = Console(width=140, highlight=False)
        self.say(f"a copy moves {self.bandwidth / 1e12:.2f} TB/s")

    def say(self, text: str) -> None:
        """A line for people."""
        self._console.print(text, markup=False)

    def measure_matmul(self) -> None:
        """BF16 throughput of the GPU in TFLOP/s, told beside the cases."""
        self.matmul = {name: kernel_timing.matmul_rate(seconds) / 1e12 for name, seconds in MATMULS.items()}
        rates = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in self.matmul.items())
        self.say(f"cuBLAS in BF16: {rates}")

    def late(self, what: str) -> bool:
        """Return whether the time is used up."""
        late = time.perf_counter() > self.stop
        if late:
            self.say(f"no time left for {what}")
        return late

    def add(
        self,
        kernel: str,
        shape: tuple[int | str, ...],
        m: int | None,
        timings: Mapping[str, kernel_timing.Timing],
        moved: Mapping[str, int],
        *,
        baseline: str = "bf16",
        exact: Mapping[str, bool],
        operations: int = 0,
    ) -> None:
        """`moved`: fewest bytes of each variant. `baseline`: the variant that `ratio` compares with; where it is BF16's GEMM,
        that is `ratio_bf16` too. `exact`: whether a variant was within its bound; of others it was not asked."""
        for variant, timing in timings.items():
            case: dict[str, Any] = {"kernel": kernel, "shape": list(shape), "m": m, "variant": variant}
            case |= {"exact": exact.get(variant), "error": timing.error, "samples": timing.samples}
            case |= dict.fromkeys(NUMBERS)
            if timing.samples:
                ratio = timings[baseline].us / timing.us
                case |= {
                    "us": timing.us,
                    "gbps": moved[variant] / timing.us / 1e3,
                    "tflops": operations / timing.us / 1e6 if operations else None,
                    "ratio": ratio,
                    "ratio_bf16": ratio if baseline == "bf16" else None,
                    "baseline": baseline,
                    "ratio_copy": moved[variant] / timing.us * 1e6 / self.bandwidth,
                }
            self.cases.append(case)
            self.say(self._line(case))
        write_cases(
            *(self.file, self.provenance, self.cases),
            copy_gbps=self.bandwidth / 1e9,
            matmul_tflops=self.matmul,
        )

    def summarize(self, kernel: str, variant: str) -> None:
        """Geometric mean and worst of a variant's ratios to BF16."""
        ratios = [
            case["ratio_bf16"]
            for case in self.cases
            if (case["kernel"], case["variant"]) == (kernel, variant) and case["samples"]
        ]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            self.say(f"{kernel}, {variant}, against BF16: geometric mean {mean:.3f}, worst {min(ratios):.3f}")

    @property
    def exact(self) -> bool:
        """Return whether every kernel of ours was within its bound."""
        return all(case["exact"] for case in self.cases if case["variant"].startswith("blockfp8"))

    @staticmethod
    def _line(case: dict[str, Any]) -> str:
        line = f"{case['kernel']:18} {'x'.join(map(str, case['shape'])):15} m={case['m']!s:5} {case['variant']:15}"
        if not case["samples"]:
            return f"{line} {case['error'][:80]}"
        numbers = f"{case['us']:9.2f} us {case['ratio']:6.2f}x {case['ratio_copy']:7.1%} of copy"
        return f"{line} {numbers}{' NOT WITHIN ITS BOUND' if case['exact'] is False else ''}"
