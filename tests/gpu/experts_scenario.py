# SPDX-License-Identifier: Apache-2.0
"""`tests/e2e/experts_scenario.py` on a GPU: CUDA graphs, batches of every size, and what is compiled meanwhile. Takes two
checkpoints, a file for what it saw, as JSON, and more arguments of the engine, as JSON too."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from experts_scenario import answers, updated
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_fp8ext.serve.embedded import embedded
from vllm_fp8ext.update.transports.wire import stored

BATCHES = (1, 2, 3, 5, 8, 13, 40, 64)
LENGTHS = (1, 5, 17, 70, 150, 300, 480)
LONG = [[3 + (5 * i + i // 11) % 500 for i in range(length)] for length in (700, 3000)]
MOST = 4096
"""Tokens of a step, and of a request."""


async def compiled(engine: AsyncLLM) -> list[dict[str, int]]:
    """By each rank."""
    counts: list[dict[str, int]] = await engine.collective_rpc("fp8ext_compiled")
    return counts


async def batch(engine: AsyncLLM, name: str, requests: int, length: int) -> None:
    """Prompts at once."""
    wanted = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)

    async def one(number: int) -> None:
        prompt = [3 + (5 * i + 13 * number) % 500 for i in range(length)]
        async for _ in engine.generate({"prompt_token_ids": prompt}, wanted, f"{name} {number}"):
            pass

    await asyncio.gather(*(one(number) for number in range(requests)))


async def main(early: str, late: str, out: str, more: str) -> None:
    arguments = {"additional_config": {"fp8ext": {"kernels": {"graph_tokens": MOST}}}, **json.loads(more)}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=early,
            quantization="blockfp8",
            max_model_len=MOST,
            max_num_batched_tokens=MOST,
            max_num_seqs=64,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=256 << 20,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            jit_monitor_verbose=True,  # its log says what Triton compiles late
            **arguments,
        )
    )
    facts: dict[str, Any] = {"early": await answers(engine, "early")}
    await batch(engine, "two", 2, 24)  # vLLM's sampler compiles kernels of its own
    facts["compiled before"] = await compiled(engine)
    for requests in BATCHES:
        await batch(engine, f"batch of {requests}", requests, 9)
    for length in LENGTHS:
        await batch(engine, f"length {length}", 3, length)
    facts["long"] = await answers(engine, "long", LONG)
    async with embedded(engine) as weights:
        facts["cold digests"] = (await weights.digests()).model_dump()
        facts["manifest"] = await weights.manifest()
        if early != late:
            facts |= await updated(
                weights, engine, dict(stored(Path(late))), dict(stored(Path(early))), answers
            )
    facts["compiled after"] = await compiled(engine)
    engine.shutdown()
    Path(out).write_text(json.dumps(facts))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
