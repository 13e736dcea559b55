# SPDX-License-Identifier: Apache-2.0
"""What a decode step takes the host, or prompts up to their first tokens, part by part: steps of a small model, or of few
tokens, wait for it, and not for the GPU.

    python benchmarks/host_step.py --shape Qwen3-1.7B --kv fp8 --cases 8x1024x256 128x1024x256 --out host_step.json
    python benchmarks/host_step.py --shape Qwen3-8B --kv fp8 --cases 1x400x1 4x1024x1    # one token out: prompts
    python benchmarks/host_step.py --checkpoint FOLDER --variants bf16 blockfp8 --kv-gib 0.5 --cases 8x16x200 \\
      --engine '{"enforce_eager": true}'   # on a CPU

One engine after the other, each in one process. A part is what its functions take without those of other parts that they
call; medians of the steps in which all requests decode, or of answers of one token, all their steps together.
"""

import argparse
import functools
import importlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from vllm_fp8ext.bench.engine_kinds import Kind, arguments, kinds, said, settings_of
from vllm_fp8ext.bench.engines import VARIANTS
from vllm_fp8ext.bench.generated import SHAPES, checkpoint
from vllm_fp8ext.bench.options import case_of, json_object
from vllm_fp8ext.bench.provenance import provenance, write_cases

RUNNER = "vllm.v1.worker.gpu"
ATTENTION = "attention but FlashAttention"
"""Of each layer, as it attends in the engine: ours is put in place of FlashAttention."""
PARTS: dict[str, list[str]] = {
    "schedule": ["vllm.v1.core.sched.scheduler:Scheduler.schedule"],
    "allocate_slots": ["vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots"],
    "update requests": [
        f"{RUNNER}.model_runner:GPUModelRunner.{name}"
        for name in ("finish_requests", "free_states", "add_requests", "update_requests")
    ]
    + [f"{RUNNER}.block_table:BlockTables.apply_staged_writes"],
    "prepare inputs": [
        f"{RUNNER}.model_runner:GPUModelRunner.{name}"
        for name in ("gather_batch_req_state", "prepare_inputs")
    ],
    "a step that follows": ["vllm_fp8ext.compat.speed.decode_step_reuse:PreviousStep.again"],
    "block tables, slots": [f"{RUNNER}.model_runner:GPUModelRunner.prepare_attn"],
    "attention's metadata": [f"{RUNNER}.model_states.default:DefaultModelState.prepare_attn"],
    "replay the graph": [f"{RUNNER}.cudagraph_utils:ModelCudaGraphManager.run_fullgraph"],
    "replay a graph's pieces": ["vllm.compilation.cuda_graph:CUDAGraphWrapper.__call__"],
    ATTENTION: [],
    "FlashAttention": ["vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward"],
    "caching K and V": ["vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update"],
    "the rest of execute_model": [f"{RUNNER}.model_runner:GPUModelRunner.execute_model"],
    "logits, sampler": [
        f"{RUNNER}.model_runner:GPUModelRunner.sample",
        "vllm_fp8ext.compat.speed.sampling_cudagraph:Samplers.sample",
    ],
    "update what was sampled": [f"{RUNNER}.model_runner:GPUModelRunner.postprocess_sampled"],
    "copy to the host": [f"{RUNNER}.async_utils:AsyncOutput.__init__"],
    "the rest of sample_tokens": [f"{RUNNER}.model_runner:GPUModelRunner.sample_tokens"],
    "wait for the GPU": ["torch.cuda:Event.synchronize"],
    "take what was copied": [f"{RUNNER}.async_utils:AsyncOutput.get_output"],
    "update_from_output": ["vllm.v1.core.sched.scheduler:Scheduler.update_from_output"],
    "launches of Triton": ["triton.runtime.jit:JITFunction.run"],
    "answers (of another process in a server)": [
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs"
    ],
}
STEP = "vllm.v1.engine.llm_engine:LLMEngine.step"
REST = "the rest"
ANSWERS = 21
console = Console()


Parts: TypeAlias = dict[str, list[float]]
"""Of each part, microseconds and calls."""


class Clock:
    """Parts of each step."""

    def __init__(self) -> None:
        self.steps: list[Parts] = []
        self._step: Parts = {}
        self._inner = [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                total = self._step.setdefault(part, [0.0, 0])
                total[0] += (took - self._inner.pop()) * 1e6
                total[1] += 1
                self._inner[-1] += took

        return call

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.timed(REST, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._step = {}
            try:
                return timed(*args, **kwargs)
            finally:
                self.steps.append(self._step)

        return call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-1.7B")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--kv-gib", type=float, default=24.0)
    parser.add_argument("--cases", nargs="+", type=case_of, default=[(8, 1024, 256), (128, 1024, 256)])
    parser.add_argument("--engine", type=json_object, default={}, help="more arguments of vllm.LLM, as JSON")
    parser.add_argument(
        "--settings",
        nargs="+",
        type=settings_of,
        default=["{}"],
        help="of blockfp8, as JSON: an engine of each",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    origin = provenance()
    cases: list[dict[str, Any]] = []
    with checkpoint(options.checkpoint, options.shape) as folder:
        for kind in kinds(options.variants, [options.kv], options.settings):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                cases += process.submit(_measure, folder, kind, options).result()
            write_cases(options.out, origin, cases)
    for case in options.cases:
        console.print(
            _table([one for one in cases if (one["requests"], one["input"], one["output"]) == case])
        )


def _table(cases: list[dict[str, Any]]) -> Table:
    """Of one case, microseconds of each part and how often it was called, by variant."""
    case = cases[0]
    title = f"{case['model']}, {case['requests']} x {case['input']}/{case['output']}"
    of = [Kind(one["variant"], one["kv_cache"], json.dumps(one["settings"], sort_keys=True)) for one in cases]
    table = Table("us a step (calls)", *map(str, of), title=title)
    for part in (*PARTS, REST):
        timings = [next((each for each in one["parts"] if each["part"] == part), None) for one in cases]
        if any(timings):
            table.add_row(
                part, *(f"{each['us']:.0f} ({each['calls']:.0f})" if each else "" for each in timings)
            )
    table.add_row("all", *(f"{one['us']:.0f}" for one in cases))
    return table


def _measure(folder: Path, kind: Kind, options: argparse.Namespace) -> list[dict[str, Any]]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    longest = max(sum(case[1:]) for case in options.cases)
    clock = Clock()
    for part, places in PARTS.items():
        for place in places:
            _replace(place, functools.partial(clock.timed, part))
    _replace(STEP, clock.step)
    engine = LLM(str(folder), **arguments(kind, longest, options.kv_gib, options.engine))
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        if hasattr(layer, "impl"):
            layer.impl.forward = clock.timed(ATTENTION, layer.impl.forward)
    results = []
    for requests, tokens, output in options.cases:
        prompts: Any = [
            {"prompt_token_ids": [1 + (i + j) % 100 for j in range(tokens)]} for i in range(requests)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        answers: list[list[Parts]] = []
        for _ in range(2 if output > 1 else 1 + ANSWERS):  # the first time is not counted
            clock.steps = []
            engine.generate(prompts, sampling, use_tqdm=False)
            answers.append(clock.steps)
        decoding = answers[-1][-(output * 3 // 4) : -4]
        steps = decoding if output > 1 else [_together(answer) for answer in answers[1:]]
        parts = []
        for part in (*PARTS, REST):
            step_parts = [step.get(part, (0.0, 0)) for step in steps]
            us, calls = (statistics.median(each) for each in zip(*step_parts, strict=True))
            if us:
                parts.append({"part": part, "us": us, "calls": calls})
        results.append(
            {
                **said(options, (requests, tokens, output), kind),
                "us": statistics.median(sum(us for us, _ in step.values()) for step in steps),
                "steps": len(steps),
                "parts": parts,
            }
        )
    return results


def _together(steps: list[Parts]) -> Parts:
    totals: Parts = {}
    for step in steps:
        for part, (us, calls) in step.items():
            total = totals.setdefault(part, [0.0, 0])
            total[0] += us
            total[1] += calls
    return totals


def _replace(place: str, change: Callable[[Any], Any]) -> None:
    """A method, named as `module:Class.method`, where there is one: not every platform's engine has all of them."""
    module, _, path = place.partition(":")
    owner, name = path.split(".")
    try:
        patched = getattr(importlib.import_module(module), owner)
    except (ImportError, AttributeError):
        return
    setattr(patched, name, change(getattr(patched, name)))


if __name__ == "__main__":
    main()
