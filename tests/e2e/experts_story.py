# SPDX-License-Identifier: Apache-2.0
"""A small mixture of experts, served and updated in one process. Takes two checkpoints, a staging, a number of ranks and
whether they share out experts; writes what it saw, as JSON, to a file."""

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_fp8ext.serve.client import AsyncClient
from vllm_fp8ext.serve.embedded import embedded
from vllm_fp8ext.weights.wire import stored

PROMPTS = [[3 + (7 * i + 11 * row) % 120 for i in range(24)] for row in range(4)]


def engine_on(model: str, staging: str, ranks: int, shared_out: bool) -> AsyncLLM:
    options: dict[str, Any] = {"tensor_parallel_size": ranks, "enable_expert_parallel": shared_out}
    if ranks > 1:
        options["distributed_executor_backend"] = "mp"
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            quantization="blockfp8",
            max_model_len=512,
            enforce_eager=True,
            kv_cache_memory_bytes=32 << 20,
            skip_tokenizer_init=True,
            additional_config={"fp8ext": {"staging": staging}},
            **options,
        )
    )


async def sampled(engine: AsyncLLM, name: str) -> list[list[Any]]:
    """Token ids and log-probabilities that the engine goes on with, greedily, one request at a time."""
    wanted = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    found: list[list[Any]] = []
    for number, prompt in enumerate(PROMPTS):
        async for output in engine.generate({"prompt_token_ids": prompt}, wanted, f"{name} {number}"):
            one = output.outputs[0]
        ids = list(one.token_ids)
        found.append(
            [ids, [step[token].logprob for step, token in zip(one.logprobs or [], ids, strict=True)]]
        )
    return found


async def updated(weights: AsyncClient, engine: AsyncLLM, late: dict[str, Any], early: dict[str, Any]) -> Any:
    """The whole of `late`, in chunks of two tensors in any order, then back, then parts of it."""
    facts: dict[str, Any] = {}
    names = sorted(late)
    random.Random(0).shuffle(names)
    opened = await weights.open(version="late")
    for number, start in enumerate(range(0, len(names), 2)):
        body = save({name: late[name] for name in names[start : start + 2]})
        await weights.put_chunk(opened.id, number, body)
    await weights.commit(opened.id)
    facts["late"] = await sampled(engine, "late")
    facts["late digests"] = (await weights.digests()).model_dump()
    await weights.push(early, version="early")
    facts["early again"] = await sampled(engine, "early again")
    facts["early digests"] = (await weights.digests()).model_dump()
    some = [name for name in names if ".experts.3." in name or name.endswith("experts.1.up_proj.weight")]
    epoch = (await weights.weights()).epoch
    part = {name: late[name] for name in some}
    await weights.push(part, version="some experts", partial=True, base_epoch=epoch)
    facts["some"] = some
    facts["some digests"] = (await weights.digests()).model_dump()
    facts["verified"] = (await weights.verify()).version
    return facts


async def main(early: str, late: str, staging: str, ranks: str, shared_out: str, out: str) -> None:
    engine = engine_on(early, staging, int(ranks), shared_out == "yes")
    facts: dict[str, Any] = {"early": await sampled(engine, "early")}
    async with embedded(engine) as weights:
        facts["cold digests"] = (await weights.digests()).model_dump()
        facts["manifest"] = await weights.manifest()
        if early != late:
            facts |= await updated(weights, engine, dict(stored(Path(late))), dict(stored(Path(early))))
    engine.shutdown()
    Path(out).write_text(json.dumps(facts))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
