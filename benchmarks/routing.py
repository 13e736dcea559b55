# SPDX-License-Identifier: Apache-2.0
"""How often FP8 sends a token to other experts than BF16 does, layer by layer; and whether an updated engine sends it where
one that was started on the same weights does.

    python benchmarks/routing.py --out benchmarks/results/routing_cpu.json

Both engines read the same tokens, problems of the tiny addition model with their answers, one at a time; nothing is sampled.
What routers choose is told by vLLM's own hooks, through which it returns routed experts where its runner can (on GPUs).
Exit code 1 when an updated engine and a cold start differ.
"""

import argparse
import asyncio
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.checkpoints import problems
from vllm_fp8ext.serve.embedded import embedded

TINY = Path(__file__).parents[1] / "tests" / "e2e" / "mixture"
"""The tiny mixture of experts of `examples/tiny/train.py --experts 8`: `early` and `late`."""

FOLLOWED = "routing.Followed"
"""What an engine is told as its `worker_extension_cls`, where this file's folder is among the paths."""

Routes = list[list[list[int]]]
"""Experts by layer, then by token in the order in which they were computed; of one token in the order of their weights."""


class Followed:
    """What a vLLM worker can do besides: remember what its routers choose. Only where nothing is compiled or captured in CUDA
    graphs."""

    model_runner: Any

    def follow_routes(self) -> None:
        self.routes: dict[int, list[list[int]]] = defaultdict(list)
        bind_routed_experts_capturer(self.model_runner.get_model(), self)

    def capture(self, layer: int, experts_MT: Any) -> None:
        """What vLLM's hook calls, in each layer of each step."""
        self.routes[layer] += experts_MT.tolist()

    def take_routes(self) -> Routes:
        taken = [self.routes[layer] for layer in sorted(self.routes)]
        self.routes.clear()
        return taken


async def followed(engine: AsyncLLM) -> None:
    """Remember from now on what its routers choose."""
    await engine.collective_rpc("follow_routes")


async def taken(engine: AsyncLLM) -> Routes:
    """What routers have chosen since this was last asked.

    Raises:
        RuntimeError: its ranks sent a token to different experts.
    """
    first, *others = await engine.collective_rpc("take_routes")
    if any(other != first for other in others):
        raise RuntimeError("ranks have sent tokens to different experts")
    return first  # type: ignore[no-any-return]  # vLLM says nothing of it


def differing(one: Routes, other: Routes) -> list[dict[str, Any]]:
    """By layer: the share of tokens whose experts differ as sets, and of choices that the other side did not make."""
    layers = []
    for layer, (here, there) in enumerate(zip(one, other, strict=True)):
        lost = [len(set(a) - set(b)) for a, b in zip(here, there, strict=True)]
        layers.append(
            {
                "layer": layer,
                "tokens": len(lost),
                "tokens_differ": sum(map(bool, lost)) / len(lost),
                "choices_differ": sum(lost) / sum(map(len, here)),
            }
        )
    return layers


async def routes(engine: AsyncLLM, prompts: list[list[int]], name: str) -> Routes:
    """Where the tokens of these prompts are sent, each prompt computed alone."""
    await taken(engine)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        async for _ in engine.generate({"prompt_token_ids": prompt}, sampling, f"{name} {number}"):
            pass
    return await taken(engine)


def engine_on(model: Path, **options: Any) -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            max_model_len=512,
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=64 << 20,
            worker_extension_cls=FOLLOWED,
            **options,
        )
    )


async def measured(early: Path, late: Path, count: int) -> list[dict[str, Any]]:
    """Each checkpoint in BF16 and in FP8, and the late one also as an update of the early one."""
    routes_by_weights: dict[str, dict[str, Routes]] = {"BF16": {}, "FP8": {}}
    tokenizer = AutoTokenizer.from_pretrained(early)
    prompts = [tokenizer.encode(problem.prompt + problem.answer) for problem in problems(count, seed=3)]
    for path in (early, late):
        for weights, options in (("BF16", {}), ("FP8", {"quantization": "blockfp8"})):
            engine = engine_on(path, **options)
            await followed(engine)
            routes_by_weights[weights][path.name] = await routes(engine, prompts, path.name)
            if (weights, path) == ("FP8", early):
                async with embedded(engine) as client:
                    await client.push(late, version="late")
                    routes_by_weights[weights]["updated"] = await routes(engine, prompts, "updated")
            engine.shutdown()
    cases = [
        {"checkpoint": path.name, "one": "BF16", "other": "FP8", **layer}
        for path in (early, late)
        for layer in differing(routes_by_weights["BF16"][path.name], routes_by_weights["FP8"][path.name])
    ]
    same = differing(routes_by_weights["FP8"][late.name], routes_by_weights["FP8"]["updated"])
    return cases + [
        {"checkpoint": late.name, "one": "FP8", "other": "FP8 after an update", **layer} for layer in same
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--early", type=Path, default=TINY / "early")
    parser.add_argument("--late", type=Path, default=TINY / "late")
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = asyncio.run(measured(options.early, options.late, options.problems))
    for case in cases:
        print(
            f"{case['checkpoint']}, layer {case['layer']}, {case['one']} against {case['other']}: "
            f"{case['tokens_differ']:.2%} of {case['tokens']} tokens, {case['choices_differ']:.2%} of choices"
        )
    write_cases(options.out, provenance(), cases)
    return int(any(case["tokens_differ"] for case in cases if case["one"] == case["other"].split()[0]))


if __name__ == "__main__":
    sys.exit(main())
