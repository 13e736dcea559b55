# SPDX-License-Identifier: Apache-2.0
"""Answers of all ranks, taken as one."""

from typing import Any

from vllm_fp8ext.errors import UpdateError

Result = dict[str, Any]
"""One rank's answer."""


def raise_first(results: list[Result]) -> None:
    """Raises the `UpdateError` of the first rank that has one."""
    for result in results:
        if "error" in result:
            raise UpdateError.from_dict(result["error"])


def distinct(problems: list[Result]) -> list[Result]:
    """Problems of all ranks, each tensor once."""
    seen = {(problem["kind"], problem["tensor"]): problem for problem in problems}
    return [{key: value for key, value in problem.items() if key != "rank"} for problem in seen.values()]


def summed(results: list[Result]) -> dict[str, tuple[float, float]]:
    """Squared quantization error and squared norm by tensor, over all ranks."""
    if len(results) == 1:  # experts of a large model are thousands
        return dict(results[0].get("errors", {}))
    sums: dict[str, tuple[float, float]] = {}
    for result in results:
        for name, (error, norm) in result.get("errors", {}).items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + error, before[1] + norm
    return sums
