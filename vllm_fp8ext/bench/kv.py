# SPDX-License-Identifier: Apache-2.0
"""Long responses in the same memory: tokens per second and preemptions with a BF16 and an FP8 KV cache.

    fp8ext bench kv --shape Qwen3-8B --out kv.json

One engine at a time has the whole GPU: weights, the shadow of live updates, and what is left for K and V. So many requests
are always in flight, spread evenly over their responses; windows of so many seconds are counted once all have begun that
find room. Weights are generated (or given, --checkpoint); token ids go in and come out.
"""

import argparse
import contextlib
import statistics
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vllm_fp8ext.bench.engines import VARIANTS as PLAIN
from vllm_fp8ext.bench.engines import Engine, in_turn, with_graphs
from vllm_fp8ext.bench.generated import SHAPES, checkpoint
from vllm_fp8ext.bench.options import CommandLine, case_of, json_object
from vllm_fp8ext.bench.provenance import provenance, write_cases

if TYPE_CHECKING:
    from vllm_fp8ext.bench.steady import Window

VARIANTS = {**PLAIN, "blockfp8_kv": {"quantization": "blockfp8", "kv_cache_dtype": "fp8"}}
"""Arguments of vLLM, by variant. The last has an FP8 KV cache, calibrated."""
CASES = ("1024x512x1024", "256x512x8192", "128x512x20480")
console = Console(width=140, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says; the exit code.

    Raises:
        ConfigError: no GPU to generate weights for, or a case that is none.
    """
    options = _parser().parse_args(arguments)
    cases = [case_of(text) for text in options.cases]
    origin = provenance()
    results: list[dict[str, Any]] = []
    with checkpoint(options.checkpoint, options.shape) as folder:
        made = (
            Engine(folder, variant, _arguments(variant, cases, options), held=True)
            for variant in options.variants
        )
        with contextlib.closing(in_turn(made)) as engines:
            for engine, seconds in engines:
                console.print(f"{engine.name}: ready after {seconds:.0f} s")
                for case in cases:
                    results.append(_measured(engine, case, options))
                    _compare(results)
                    _tell(results[-1])
                    # as far as it came, whatever happens to the next
                    write_cases(options.out, origin, results)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandLine("kv", __doc__)
    parser.add_engines(SHAPES, VARIANTS, CASES, "one after the other")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each window")
    parser.add_argument("--repeats", type=int, default=2, help="windows of each case")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, help="as vLLM's, for each engine"
    )
    parser.add_argument(
        "--settings", type=json_object, default={}, help="more settings of blockfp8, as JSON: staging, say"
    )
    return parser


def _arguments(
    variant: str, cases: list[tuple[int, int, int]], options: argparse.Namespace
) -> dict[str, Any]:
    chosen = VARIANTS[variant]
    scales = {"kv_scales": "calibrate"} if "kv_cache_dtype" in chosen else {}
    settings = with_graphs({**scales, **options.settings})
    return {
        **chosen,
        **({"additional_config": {"fp8ext": settings}} if variant.startswith("blockfp8") else {}),
        "max_model_len": max(tokens + output for _, tokens, output in cases) + 16,
        "max_num_seqs": max(requests for requests, _, _ in cases),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        **options.engine,
    }


def _measured(engine: Engine, case: tuple[int, int, int], options: argparse.Namespace) -> dict[str, Any]:
    from vllm_fp8ext.bench.steady import SteadyLoad

    (requests, tokens, output), variant = case, engine.name
    load = SteadyLoad(
        requests=requests, tokens=tokens, output=output, windows=options.repeats, seconds=options.seconds
    )
    windows: list[Window] = engine.steady(load)
    rates = [window.rate for window in windows]
    ours = variant.startswith("blockfp8")
    return {
        "model": options.checkpoint.name if options.checkpoint else options.shape,
        "requests": requests,
        "input": tokens,
        "output": output,
        "variant": variant,
        "kv_cache": VARIANTS[variant].get("kv_cache_dtype", "auto"),
        "staging": options.settings.get("staging", "shadow") if ours else "none",
        "settings": options.settings if ours else {},
        "engine": options.engine,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_tokens": engine.kv_tokens(),
        "preemptions": sum(window.preemptions for window in windows),
        "running": statistics.mean(window.running for window in windows),
        "seconds": sum(window.seconds for window in windows),
        "tokens_per_s": statistics.median(rates),
        "samples": rates,
    }


def _compare(results: list[dict[str, Any]]) -> None:
    """Give each its ratio to BF16, which may be measured after it."""
    case = itemgetter("requests", "input", "output")
    base = {case(other): other["tokens_per_s"] for other in results if other["variant"] == "bf16"}
    for result in results:
        if case(result) in base:
            result["ratio_bf16"] = result["tokens_per_s"] / base[case(result)]


def _tell(result: dict[str, Any]) -> None:
    ratio = f"{result['ratio_bf16']:5.2f}x" if "ratio_bf16" in result else "     –"
    console.print(
        f"{result['requests']:4} x {result['input']}/{result['output']} {result['variant']:14} "
        f"{result['tokens_per_s']:9.0f} tok/s {ratio}  "
        f"{result['kv_tokens']:9,} tokens of K and V, {result['running']:6.1f} requests running, "
        f"{result['preemptions']} preemptions"
    )
