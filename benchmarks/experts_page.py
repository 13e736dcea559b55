# SPDX-License-Identifier: Apache-2.0
"""The table of kernels in `docs/moe.md` from the results.

python benchmarks/experts_page.py
"""

import json
from pathlib import Path
from typing import Any

from vllm_fp8ext.bench import pages
from vllm_fp8ext.kernels.moe.expert_configs import ExpertChoice, expert_route

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "moe.md"
EXPERTS, CHOSEN = 128, 8
"""Of Qwen3-30B-A3B."""
Cases = list[dict[str, Any]]


def main() -> None:
    pages.fill(PAGE, {"kernels": table(cases())})


def cases() -> Cases:
    """Of all kernels."""
    measured: Cases = json.loads((ROOT / "benchmarks" / "results" / "kernels_h200.json").read_text())["cases"]
    return measured


def table(cases: Cases) -> str:
    """Return the variants by number of tokens: of blockfp8, the kernel and tile config chosen for so many."""
    route = expert_route(EXPERTS, CHOSEN, ("deep_gemm", "triton", "fused"))
    measured: dict[int, dict[str, dict[str, Any]]] = {}
    for case in cases:
        if case["kernel"] == "experts":
            measured.setdefault(case["m"], {})[case["variant"]] = case
    rows = []
    for tokens, variants in sorted(measured.items()):
        choice = route.choose(tokens)
        cells = [_cell(variants[name]) for name in ("stock", variant(choice))]
        rows.append([str(tokens), f"{variants['bf16']['us']:.1f}", *cells, f"`{choice.kernel}`"])
    alone, summed = (_quantizing(cases, variant) for variant in ("blockfp8", "blockfp8_sums"))
    lines = [
        pages.table(["tokens", "BF16", "`fp8_per_block`", "`blockfp8`", "by"], rows),
        "",
        f"Its weights are quantized, BF16 to codes and scales, in {alone},",
        f"with the sums of errors that an update takes in {summed}. (A copy writes half of what it moves, this a third.)",
    ]
    return "\n".join(lines)


def _quantizing(cases: list[dict[str, Any]], variant: str) -> str:
    case = next(c for c in cases if (c["kernel"], c["variant"]) == ("quantize_experts", variant))
    return f"{case['us']:.0f} us, at {100 * case['ratio_copy']:.0f} % of copy bandwidth"


def variant(choice: ExpertChoice) -> str:
    """As `fp8ext bench kernels --only experts` calls it."""
    return f"blockfp8_{choice.config.name if choice.config else choice.kernel}"


def _cell(case: dict[str, Any]) -> str:
    return f"{case['us']:.1f} ({case['ratio_bf16']:.2f}×)"


if __name__ == "__main__":
    main()
